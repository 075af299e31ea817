// SPDX-License-Identifier: Apache-2.0
// Sorting of many whole numbers by some of their bits, without branches that depend on them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace lode {

/// Sorts by the bits from `begin` to `end`, lowest digit first; numbers that are equal in these stay in their order.
/// `spare` is scratch memory.
inline void radix_sort(std::vector<std::uint64_t>& x, std::vector<std::uint64_t>& spare, int begin, int end) {
  constexpr int kDigit = 11;
  spare.resize(x.size());
  for (int shift = begin; shift < end; shift += kDigit) {
    const auto digit = [&](std::uint64_t value) { return value >> shift & ((1u << kDigit) - 1u); };
    std::array<std::size_t, (1u << kDigit) + 1> next{};
    for (const std::uint64_t value : x) ++next[digit(value) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (const std::uint64_t value : x) spare[next[digit(value)]++] = value;
    x.swap(spare);
  }
}

}  // namespace lode
