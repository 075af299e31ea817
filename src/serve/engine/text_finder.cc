// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/text_finder.h"

#include <algorithm>
#include <array>

#include "base/hash.h"
#include "text/blanks.h"

namespace lode::serve {

namespace {

// A hash of 64 bytes modulo 2^64: sum of value(byte i) x base^(63 - i). Values are spread over 64 bits, since small ones
// would leave the upper bits of short differences alike.
constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15u;

constexpr std::uint64_t value_of(unsigned char byte) {
  std::uint64_t x = byte + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 27);
}

constexpr std::array<std::uint64_t, 256> values() {
  std::array<std::uint64_t, 256> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = value_of(static_cast<unsigned char>(i));
  return all;
}
constexpr std::array<std::uint64_t, 256> kValues = values();

constexpr std::uint64_t power(std::size_t exponent) {
  std::uint64_t result = 1;
  for (std::size_t i = 0; i < exponent; ++i) result *= kBase;
  return result;
}

}  // namespace

std::uint64_t TextFinder::anchor_of(std::string_view text) {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < kAnchor; ++i)
    hash = hash * kBase + kValues[static_cast<unsigned char>(text[i])];
  return hash;
}

std::uint64_t TextFinder::rolled(std::uint64_t hash, unsigned char out, unsigned char in) {
  constexpr std::uint64_t kLeading = power(kAnchor - 1);
  return (hash - kValues[out] * kLeading) * kBase + kValues[in];
}

void TextFinder::add(const std::string& name, std::string_view text) {
  remove(name);
  text = without_blanks(text);
  if (text.size() < kAnchor) return;
  known_.emplace(anchor_of(text), Known{name, hash_hex(text), text.size()});
}

void TextFinder::remove(const std::string& name) {
  std::erase_if(known_, [&](const auto& entry) { return entry.second.name == name; });
}

bool TextFinder::is_at(const Known& known, std::string_view text, std::size_t begin) const {
  return text.size() - begin >= known.bytes && hash_hex(text.substr(begin, known.bytes)) == known.hash;
}

}  // namespace lode::serve
