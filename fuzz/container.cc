// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .lode file. Random bytes never have right checksums, so most inputs become the fields of a
// forged file whose checksums are right: the first byte chooses what the rest stands for.
#include "io/container.h"

#include <cstring>

#include "fuzz/target.h"
#include "support/forged_container.h"
#include "support/memory_file.h"

namespace {

std::string file_of(std::string_view input) {
  const int mode = input.empty() ? 0 : static_cast<unsigned char>(input[0]) % 3;
  if (!input.empty()) input.remove_prefix(1);
  if (mode == 0) return std::string(input);
  lode::test::ForgedContainer forged = {.body = std::string(8192, 'b')};
  if (mode == 2) {
    std::uint64_t words[3] = {};
    std::memcpy(words, input.data(), std::min(sizeof words, input.size()));
    forged.table_offset = words[0];
    forged.table_bytes = words[1];
    forged.major = static_cast<std::uint32_t>(words[2]);
    forged.order_mark ^= static_cast<std::uint32_t>(words[2] >> 32);
    input.remove_prefix(std::min(sizeof words, input.size()));
  }
  forged.table = input;
  return forged.bytes();
}

}  // namespace

LODE_FUZZ_TARGET(container) {
  const lode::test::MemoryFile file(file_of(input));
  const lode::ContainerReader reader(file.path());
  reader.verify_all();
  for (const lode::SectionInfo& section : reader.sections()) {
    LODE_ASSERT(reader.has(section.name));
    LODE_ASSERT(reader.bytes(section.name).size() == section.bytes);
  }
}
