// SPDX-License-Identifier: Apache-2.0
// The k largest of n scores, with a tie rule that does not depend on how the work is done.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>

#include "kernels/kernels.h"

namespace lode {
namespace {

/// Unsigned numbers in the order of the floats; NaN sorts with -inf, below every number.
std::uint32_t ordered(float x) {
  if (!(x > -std::numeric_limits<float>::infinity())) return 0;
  const auto u = std::bit_cast<std::uint32_t>(x + 0.0f);  // -0 and 0 are one number
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/// The key of the k-th largest score, and how many scores with just that key belong to the k largest. Radix
/// selection: 11, 11 and 10 bits, each pass over the scores that agree so far.
struct Threshold {
  std::uint32_t key;
  std::int64_t at_key;
};
Threshold find_threshold(std::span<const float> scores, std::int64_t k) {
  std::uint32_t prefix = 0, mask = 0;
  constexpr std::pair<int, int> kPasses[] = {{21, 11}, {10, 11}, {0, 10}};
  for (const auto& [shift, bits] : kPasses) {
    std::array<std::int64_t, 2048> count{};
    const std::uint32_t low = (1u << bits) - 1u;
    for (const float score : scores) {
      const std::uint32_t key = ordered(score);
      if ((key & mask) == prefix) ++count[(key >> shift) & low];
    }
    std::uint32_t bin = low;
    while (count[bin] < k) k -= count[bin--];
    prefix |= bin << shift;
    mask |= low << shift;
  }
  return {prefix, k};
}

}  // namespace

void top_k(std::span<const float> scores, std::int64_t k, Position offset, std::vector<Position>& out) {
  const auto n = static_cast<std::int64_t>(scores.size());
  out.clear();
  if (k <= 0) return;
  if (k >= n) {
    for (std::int64_t i = 0; i < n; ++i) out.push_back(offset + static_cast<Position>(i));
    return;
  }
  Threshold threshold = find_threshold(scores, k);
  out.resize(static_cast<std::size_t>(k));
  // From the end, so that among equal scores the higher positions come first.
  auto slot = out.end();
  for (std::int64_t i = n - 1; slot != out.begin(); --i) {
    const std::uint32_t key = ordered(scores[static_cast<std::size_t>(i)]);
    if (key < threshold.key || (key == threshold.key && threshold.at_key-- <= 0)) continue;
    *--slot = offset + static_cast<Position>(i);
  }
}

}  // namespace lode
