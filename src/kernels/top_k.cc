// SPDX-License-Identifier: Apache-2.0
// The k largest of n scores, with a tie rule that does not depend on how the work is done. Of many scores a
// sample tells which one about k reach; the rest is passed over at the speed of reading.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/score_order.h"

namespace lode {
namespace {

/// The key of the k-th largest score, and how many scores with just that key belong to the k largest. Radix
/// selection: 11, 11 and 10 bits, each pass over the scores that agree so far.
struct Threshold {
  std::uint32_t key;
  std::int64_t at_key;
};
Threshold find_threshold(std::span<const float> scores, std::int64_t k) {
  constexpr std::pair<int, int> kPasses[] = {{21, 11}, {10, 11}, {0, 10}};
  thread_local std::vector<std::uint32_t> keys;
  keys.resize(scores.size());
  std::transform(scores.begin(), scores.end(), keys.begin(), ordered);
  std::uint32_t prefix = 0;
  for (const auto& [shift, bits] : kPasses) {
    std::array<std::int64_t, 2048> count{};
    const std::uint32_t low = (1u << bits) - 1u;
    for (const std::uint32_t key : keys) ++count[(key >> shift) & low];
    std::uint32_t bin = low;
    while (count[bin] < k) k -= count[bin--];
    prefix |= bin << shift;
    std::erase_if(keys, [&, s = shift](std::uint32_t key) { return ((key >> s) & low) != bin; });
  }
  return {prefix, k};
}

/// Those of many scores that can be among the k largest: a few more than k, found in one pass.
struct Candidates {
  std::vector<float> sample, scores;
  std::vector<Position> at;  // rising, where `scores` stood

  /// False when k is no small part of them, or chance had it otherwise.
  bool collect(std::span<const float> all, std::int64_t k);
};

bool Candidates::collect(std::span<const float> all, std::int64_t k) {
  constexpr std::size_t kStride = 32, kBlock = 16;
  // The rank in the sample that more than k scores reach, but for a chance of one in thousands.
  const double share = static_cast<double>(k) / static_cast<double>(kStride);
  const auto rank = static_cast<std::size_t>(share + 4.0 * std::sqrt(share) + 4.0);
  if (4 * rank * kStride > all.size()) return false;
  sample.clear();
  for (std::size_t i = kStride / 2; i < all.size(); i += kStride)
    sample.push_back(std::isnan(all[i]) ? -std::numeric_limits<float>::infinity() : all[i]);
  const auto nth = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), nth, sample.end(), std::greater<>());
  const float least = *nth;
  if (least == -std::numeric_limits<float>::infinity()) return false;
  scores.clear();
  at.clear();
  for (std::size_t begin = 0; begin < all.size(); begin += kBlock) {
    const std::span<const float> block = all.subspan(begin, std::min(kBlock, all.size() - begin));
    int reached = 0;  // compared without branches, most blocks are passed over
    for (const float score : block) reached |= score >= least ? 1 : 0;
    if (reached == 0) continue;
    for (std::size_t i = 0; i < block.size(); ++i) {
      if (!(block[i] >= least)) continue;
      scores.push_back(block[i]);
      at.push_back(static_cast<Position>(begin + i));
    }
  }
  return std::ssize(scores) >= k;
}

/// out := position(i) of the k largest scores, rising in i; 0 < k < scores.size().
template <class PositionOf>
void largest(std::span<const float> scores, std::int64_t k, const PositionOf& position,
             std::vector<Position>& out) {
  Threshold threshold = find_threshold(scores, k);
  out.resize(static_cast<std::size_t>(k));
  // From the end, so that among equal scores the higher positions come first.
  auto slot = out.end();
  for (std::size_t i = scores.size(); slot != out.begin();) {
    const std::uint32_t key = ordered(scores[--i]);
    if (key < threshold.key || (key == threshold.key && threshold.at_key-- <= 0)) continue;
    *--slot = position(i);
  }
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
  thread_local Candidates few;
  if (few.collect(scores, k))
    return largest(
        few.scores, k, [&](std::size_t i) { return offset + few.at[i]; }, out);
  largest(
      scores, k, [&](std::size_t i) { return offset + static_cast<Position>(i); }, out);
}

}  // namespace lode
