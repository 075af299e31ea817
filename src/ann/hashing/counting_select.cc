// SPDX-License-Identifier: Apache-2.0
#include "ann/hashing/counting_select.h"

#include <algorithm>

#include "kernels/select/signature.h"

namespace lode {

namespace {

using Distances = std::span<const std::uint16_t>;

std::int64_t up_to(Distances distance, std::int64_t limit) {
  if (limit < 0) return 0;
  if (limit > 0xffff) return std::ssize(distance);
  return signature_kernels().count_up_to(distance.data(), std::ssize(distance),
                                         static_cast<std::uint16_t>(limit));
}

/// The level that the k-th nearest of a thin sample has: most often the answer or beside it.
std::int64_t guess_level(Distances distance, std::int64_t k) {
  constexpr std::size_t kSample = 256;
  const std::size_t n = distance.size(), stride = std::max<std::size_t>(1, n / kSample);
  std::vector<std::uint16_t> sample;
  sample.reserve(2 * kSample);
  for (std::size_t i = 0; i < n; i += stride) sample.push_back(distance[i]);
  const auto rank = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(k - 1) / stride);
  const auto nth = sample.begin() + std::min(rank, std::ssize(sample) - 1);
  std::nth_element(sample.begin(), nth, sample.end());
  return *nth;
}

/// The smallest distance that at least k keys do not exceed, 1 <= k <= n, and how many keys are nearer than
/// it.
struct Level {
  std::int64_t distance, nearer, keys;
};
Level level_of(Distances distance, std::int64_t k) {
  // `nearer` keys do not exceed low, `keys` do not exceed high, and nearer < k <= keys. The guess is close,
  // so the search walks away from it with steps that double until it has passed the answer, then halves.
  std::int64_t low = -1, nearer = 0, high = 0xffff, keys = std::ssize(distance);
  std::int64_t at = guess_level(distance, k);
  bool below = false, above = false;
  for (std::int64_t step = 1; high - low > 1; step *= 2) {
    at = std::clamp(at, low + 1, high - 1);
    if (const std::int64_t count = up_to(distance, at); count >= k) {
      high = at, keys = count, above = true;
    } else {
      low = at, nearer = count, below = true;
    }
    at = below && above ? low + (high - low) / 2 : above ? high - step : low + step;
  }
  return {high, nearer, keys};
}

/// The largest i such that at least k of the distances from i on equal `level`.
std::size_t newest_at(Distances distance, std::int64_t level, std::int64_t k) {
  constexpr std::size_t kBlock = 1024;
  std::size_t end = distance.size();
  while (true) {
    const std::size_t begin = end > kBlock ? end - kBlock : 0;
    const Distances block = distance.subspan(begin, end - begin);
    const std::int64_t here = up_to(block, level) - up_to(block, level - 1);
    if (here >= k) break;
    k -= here;
    end = begin;
  }
  while (k > 0) {
    if (distance[--end] == level) --k;
  }
  return end;
}

/// Appends the keys that do not exceed `limit`, of which there are `keys`.
void collect(Distances distance, std::int64_t limit, std::int64_t keys, Position offset,
             std::vector<Position>& rows) {
  if (keys == 0) return;
  const std::size_t before = rows.size();
  rows.resize(before + static_cast<std::size_t>(std::min(keys + 16, std::ssize(distance))));
  const auto capped = static_cast<std::uint16_t>(std::min<std::int64_t>(limit, 0xffff));
  signature_kernels().collect_up_to(distance.data(), std::ssize(distance), capped, offset,
                                    rows.data() + before);
  rows.resize(before + static_cast<std::size_t>(keys));
}

}  // namespace

void select_near(Distances distance, const NearRule& rule, Position offset, std::vector<Position>& rows) {
  rows.clear();
  const std::int64_t n = std::ssize(distance), budget = std::min(rule.budget, n);
  const bool counted = rule.mode != NearRule::Mode::depth;
  if (n == 0 || (counted && budget <= 0)) return;
  if (rule.mode != NearRule::Mode::count) {
    const std::int64_t limit = signature_kernels().least(distance.data(), n) + rule.depth;
    const std::int64_t keys = up_to(distance, limit);
    if (!counted || keys < budget) return collect(distance, limit, keys, offset, rows);
  }
  const Level level = level_of(distance, budget);
  if (rule.all_ties || level.keys == budget)
    return collect(distance, level.distance, level.keys, offset, rows);
  const std::size_t cut = newest_at(distance, level.distance, budget - level.nearer);
  const Distances older = distance.first(cut);
  const std::int64_t before = up_to(older, level.distance - 1);
  collect(older, level.distance - 1, before, offset, rows);
  collect(distance.subspan(cut), level.distance, budget - before, offset + static_cast<Position>(cut), rows);
}

}  // namespace lode
