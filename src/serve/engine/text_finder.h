// SPDX-License-Identifier: Apache-2.0
// Finds known texts inside others, by content and wherever they stand, in one pass: a rolling hash of 64 bytes finds
// where one may begin, XXH3-128 says whether it is the text. (Rabin and Karp, 1987.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace lode::serve {

class TextFinder {
 public:
  /// Texts below 64 bytes, blanks at both ends apart, are not looked for.
  void add(const std::string& name, std::string_view text);
  void remove(const std::string& name);

  struct Found {
    std::string name;
    std::size_t begin = 0, end = 0;  ///< bytes of the text that was searched, without the blanks at both ends
  };
  /// The longest known text; `wanted` says which names count.
  template <class Wanted>
  std::optional<Found> longest_in(std::string_view text, const Wanted& wanted) const {
    std::optional<Found> best;
    visit(text, [&](const Found& found) {
      if ((!best || found.end - found.begin > best->end - best->begin) && wanted(found.name)) best = found;
    });
    return best;
  }

 private:
  static constexpr std::size_t kAnchor = 64, kMostCompared = 8;
  struct Known {
    std::string name, hash;
    std::size_t bytes = 0;
  };
  template <class Visit>
  void visit(std::string_view text, const Visit& each) const;
  bool is_at(const Known& known, std::string_view text, std::size_t begin) const;
  static std::uint64_t anchor_of(std::string_view text);
  static std::uint64_t rolled(std::uint64_t hash, unsigned char out, unsigned char in);

  std::unordered_multimap<std::uint64_t, Known> known_;  // by the hash of the first 64 bytes
};

// ---- Details. -------------------------------------------------------------------------------------------------

template <class Visit>
void TextFinder::visit(std::string_view text, const Visit& each) const {
  if (known_.empty() || text.size() < kAnchor) return;
  std::uint64_t hash = anchor_of(text);
  std::size_t compared = 0;  // bytes; bounded, since a text of one letter begins everywhere
  for (std::size_t at = 0; compared <= kMostCompared * text.size(); ++at) {
    const auto [first, last] = known_.equal_range(hash);
    for (auto known = first; known != last; ++known) {
      compared += known->second.bytes;
      if (is_at(known->second, text, at)) each(Found{known->second.name, at, at + known->second.bytes});
    }
    if (at + kAnchor >= text.size()) return;
    hash = rolled(hash, static_cast<unsigned char>(text[at]), static_cast<unsigned char>(text[at + kAnchor]));
  }
}

}  // namespace lode::serve
