// SPDX-License-Identifier: Apache-2.0
// A .lode file as an attacker writes it, after docs/file-format.md: any header, table and sections, and
// checksums that are right all the same.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "base/hash.h"

namespace lode::test {

struct ForgedContainer {
  std::string body;   ///< from offset 4096, before the table
  std::string table;  ///< JSON
  std::uint32_t order_mark = 0x01020304, major = 1, minor = 0;
  std::optional<std::uint64_t> table_offset, table_bytes, file_bytes;  ///< lies, when given

  static constexpr std::size_t kPage = 4096;
  static constexpr const char* kMagic = "LODE\r\n\x1a\n";

  std::string bytes() const {
    std::string file = std::string(kPage, '\0') + body;
    const std::uint64_t at = file.size();
    file += table;
    const std::uint64_t size = file_bytes.value_or(file.size() + 16);
    append(file, size);
    file += kMagic;
    std::string header = kMagic;
    for (const std::uint32_t word : {order_mark, major, minor, 0u}) append(header, word);
    append(header, table_offset.value_or(at));
    append(header, table_bytes.value_or(table.size()));
    append(header, size);
    header += hash_hex(table);
    header += hash_hex(header);
    return file.replace(0, header.size(), header);
  }

 private:
  template <class Number>
  static void append(std::string& text, Number number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
};

}  // namespace lode::test
