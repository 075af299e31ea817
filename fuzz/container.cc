// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .lode file. Random bytes never have right checksums, so most inputs become the fields of a
// forged file whose checksums are right: the first byte chooses what the rest stands for.
#include "io/container.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "fuzz/target.h"
#include "support/forged_container.h"

namespace {

/// A file in memory, reachable by a path.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    LODE_ASSERT(fd_ >= 0 && ::write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }
  ~MemoryFile() { ::close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

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
  const MemoryFile file(file_of(input));
  const lode::ContainerReader reader(file.path());
  reader.verify_all();
  for (const lode::SectionInfo& section : reader.sections()) {
    LODE_ASSERT(reader.has(section.name));
    LODE_ASSERT(reader.bytes(section.name).size() == section.bytes);
  }
}
