// SPDX-License-Identifier: Apache-2.0
// A set of small integers that gives its members back in rising order: cheaper than a sort for the hundreds
// to tens of thousands of keys that one query picks.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace lode {

class RowSet {
 public:
  /// Makes room for members in [0, limit). The set must be empty: new, or drained.
  void reset(std::int64_t limit) {
    const auto words = static_cast<std::size_t>((limit + 63) / 64);
    if (words_.size() < words) words_.resize(words);
    used_ = words;
  }
  void insert(std::int64_t row) {
    words_[static_cast<std::size_t>(row >> 6)] |= std::uint64_t{1} << (row & 63);
  }
  bool contains(std::int64_t row) const {
    return (words_[static_cast<std::size_t>(row >> 6)] >> (row & 63) & 1u) != 0;
  }
  /// body(row) for every member, rising; the set is empty afterwards.
  void drain(const auto& body) {
    for (std::size_t w = 0; w < used_; ++w) {
      for (std::uint64_t rest = std::exchange(words_[w], 0); rest != 0; rest &= rest - 1) {
        body(static_cast<std::int64_t>(w) * 64 + std::countr_zero(rest));
      }
    }
  }

 private:
  std::vector<std::uint64_t> words_;
  std::size_t used_ = 0;
};

}  // namespace lode
