// SPDX-License-Identifier: Apache-2.0
// XXH3-128 checksums: against damage, not against attackers.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace lode {

/// 32 hexadecimal digits.
std::string hash_hex(std::span<const std::byte> bytes);
inline std::string hash_hex(std::string_view text) {
  return hash_hex(std::as_bytes(std::span(text)));
}

/// The same of bytes that come in pieces.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  void add(std::span<const std::byte> bytes);
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lode
