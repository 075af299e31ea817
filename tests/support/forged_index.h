// SPDX-License-Identifier: Apache-2.0
// A method's saved index as an attacker alters it: the container around it is sound and every checksum is
// right.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/json.h"
#include "io/container.h"
#include "lodestone/selector.h"
#include "support/forged_container.h"
#include "support/memory_file.h"

namespace lode::test {

inline constexpr const char* kIndexPrefix = "select/3/";

/// The sections of an index: full name and bytes.
using IndexSections = std::vector<std::pair<std::string, std::string>>;

inline IndexSections saved_sections(const Selector& selector, std::int32_t sequence = 0) {
  const auto path = std::filesystem::temp_directory_path() / ("lodestone-index-" + std::to_string(getpid()));
  ContainerWriter out(path);
  SectionWriter to(out, kIndexPrefix);
  selector.save(sequence, to);
  out.finish();
  IndexSections sections;
  const ContainerReader in(path);
  std::filesystem::remove(path);
  for (const SectionInfo& section : in.sections()) {
    const auto bytes = in.bytes(section.name);
    sections.emplace_back(section.name,
                          std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  return sections;
}

/// One change: `kind` 0 to 2 overwrite 1, 4 or 8 bytes, 3 gives the section another size, 4 drops it.
struct Forgery {
  std::uint8_t section = 0, kind = 0;
  std::uint16_t place = 0;
  std::uint64_t value = 0;

  static constexpr std::size_t kBytes = 12;
  static Forgery parse(std::string_view bytes /*[kBytes]*/) {
    Forgery f;
    std::memcpy(&f.section, bytes.data(), 1);
    std::memcpy(&f.kind, bytes.data() + 1, 1);
    std::memcpy(&f.place, bytes.data() + 2, 2);
    std::memcpy(&f.value, bytes.data() + 4, 8);
    return f;
  }

  void apply(IndexSections& sections) const {
    if (sections.empty()) return;
    const auto at = sections.begin() + section % std::ssize(sections);
    std::string& bytes = at->second;
    constexpr std::size_t kMostBytes = 64 << 10;
    switch (kind % 5) {
      case 3:
        bytes.resize(value % kMostBytes, 'x');
        break;
      case 4:
        sections.erase(at);
        break;
      default: {
        const std::size_t width = kind % 5 == 0 ? 1 : kind % 5 == 1 ? 4 : 8;
        if (bytes.size() < width) break;
        const std::size_t to = place * width % (bytes.size() - width + 1);
        std::memcpy(bytes.data() + to / width * width, &value, width);
      }
    }
  }
};

/// Loads the sections from a file that holds them alone.
inline void load_sections(Selector& selector, const IndexSections& sections, KvLayer kv,
                          std::int32_t sequence = 0) {
  ForgedContainer forged;
  Json table = Json::array();
  for (const auto& [name, bytes] : sections) {
    table.push_back({{"name", name},
                     {"offset", ForgedContainer::kPage + forged.body.size()},
                     {"bytes", bytes.size()},
                     {"xxh3", hash_hex(bytes)}});
    forged.body += bytes;
    forged.body.resize((forged.body.size() + ForgedContainer::kPage - 1) / ForgedContainer::kPage *
                       ForgedContainer::kPage);
  }
  forged.table = table.dump();
  const MemoryFile file(forged.bytes());
  const ContainerReader in(file.path());
  SectionReader from(in, kIndexPrefix);
  selector.load(sequence, from, kv);
}

}  // namespace lode::test
