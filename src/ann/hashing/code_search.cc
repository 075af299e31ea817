// SPDX-License-Identifier: Apache-2.0
#include "ann/hashing/code_search.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ann/hashing/counting_select.h"
#include "ann/radix_sort.h"
#include "kernels/select/signature.h"

namespace lode {

namespace {

constexpr std::int64_t kBlock = 16384;  // keys whose distances stay in the second-level cache
constexpr std::int64_t kFew = 32768;    // keys that are not worth a sample
constexpr std::int64_t kRun = 16;  // keys of a sample that lie side by side: a cache line of 32-bit codes
constexpr std::int64_t kLeastSample = 2048, kMostSample = 65536, kKeysPerSample = 64;
constexpr std::int64_t kSplitSample = 2048;  // of those, what the split of a limit is chosen by
// Measured: what a cell of the tables, a key in it and a key within the limit cost, in keys of a pass over
// all codes.
constexpr double kCell = 48, kKeyInCell = 6, kKeyFound = 20;

}  // namespace

/// levels_ := the distances of runs of keys that are spread evenly.
void CodeSearch::sample(const CodeQuery& query) {
  const std::int64_t wanted = std::clamp(query.n / kKeysPerSample, kLeastSample, kMostSample);
  const std::int64_t runs = wanted / kRun;
  sampled_.clear();
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t first = run * query.n / runs, last = std::min(query.n, first + kRun);
    sampled_.insert(sampled_.end(), query.keys + first * query.words, query.keys + last * query.words);
  }
  const std::int64_t size = std::ssize(sampled_) / query.words;
  distance_.resize(static_cast<std::size_t>(std::max(size, kFew)));
  signature_kernels().distances(sampled_.data(), size, query.words, query.queries, query.count, false,
                                distance_.data());
  levels_.assign(static_cast<std::size_t>(query.count * query.words * 32 + 1), 0);
  for (std::int64_t i = 0; i < size; ++i) ++levels_[distance_[static_cast<std::size_t>(i)]];
}

/// The least level that most likely as large a share of all keys does not exceed: two deviations of the
/// sample's count are allowed for.
int CodeSearch::limit_for(double share) const {
  double expected = 0;
  for (const std::int64_t keys : levels_) expected += share * static_cast<double>(keys);
  const auto wanted = static_cast<std::int64_t>(expected + 2.0 * std::sqrt(expected) + 1.0);
  std::size_t level = 0;
  for (std::int64_t keys = levels_[0]; keys < wanted && level + 1 < levels_.size();) keys += levels_[++level];
  return static_cast<int>(level);
}

/// Adds the keys from `begin` on that do not exceed `limit`.
CodeSearch::Work CodeSearch::scan(const CodeQuery& query, std::int64_t begin, int limit) {
  const SignatureKernels& table = signature_kernels();
  const Work work = {.keys = query.n - begin,
                     .bytes = (query.n - begin) * query.words * std::int64_t{sizeof(std::uint32_t)}};
  for (; begin < query.n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, query.n - begin);
    near_.make_room(count);
    table.distances(query.keys + begin * query.words, count, query.words, query.queries, query.count, false,
                    distance_.data());
    Position* const keys = near_.next_key();
    std::uint16_t* const distance = near_.next_distance();
    const std::int64_t found =
        table.collect_up_to(distance_.data(), count, static_cast<std::uint16_t>(limit), 0, keys);
    for (std::int64_t i = 0; i < found; ++i) {
      distance[i] = distance_[static_cast<std::size_t>(keys[i])];
      keys[i] += static_cast<Position>(begin);
    }
    near_.size += found;
  }
  return work;
}

/// The split of `limit` for which the sample has the fewest keys in the cells that are read.
CodeSearch::Split CodeSearch::split_of(const CodeQuery& query, const ByteCosts& costs, int limit) const {
  const int most = limit - costs.avoided_by_none;
  Split best;
  if (most < 0) return best;
  std::vector<std::int64_t> low(static_cast<std::size_t>(most + 2), 0), high = low;  // beyond most: the last
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(1, std::ssize(sampled_) / kSplitSample));
  double found = 0, seen = 0;
  for (std::size_t i = 0; i < sampled_.size(); i += step) {
    const int below = costs.low(sampled_[i]), above = costs.high(sampled_[i]);
    ++low[static_cast<std::size_t>(std::min(below, most + 1))];
    ++high[static_cast<std::size_t>(std::min(above, most + 1))];
    found += below + above <= most ? 1 : 0;
    seen += 1;
  }
  std::int64_t keys = 0;  // of the sample, for low = -1
  for (int cost = 0; cost <= most; ++cost) keys += high[static_cast<std::size_t>(cost)];
  std::int64_t fewest = keys;
  for (int cost = 0; cost <= most; ++cost) {
    keys += low[static_cast<std::size_t>(cost)] - high[static_cast<std::size_t>(most - cost)];
    if (keys < fewest) fewest = keys, best.low = cost;
  }
  const double scale = static_cast<double>(query.n) / seen, read = static_cast<double>(fewest) * scale;
  const std::int64_t cells = cells_within(costs, 0, best.low) + cells_within(costs, 1, most - best.low - 1);
  best.effort =
      kCell * std::min(static_cast<double>(cells), read) + kKeyInCell * read + kKeyFound * found * scale;
  return best;
}

/// near_ := the keys that do not exceed `limit`.
CodeSearch::Work CodeSearch::search(const CodeQuery& query, const CodeTables& tables, int limit,
                                    bool& ordered) {
  near_.size = 0;
  ordered = true;
  if (tables.tables == nullptr || tables.tables->size() == 0 || query.words != 1)
    return scan(query, 0, limit);
  const ByteCosts costs(query.queries, query.count);
  const Split split = split_of(query, costs, limit);
  const std::int64_t inside = std::min(tables.tables->size(), query.n);
  if (!tables.always && split.effort > static_cast<double>(inside)) return scan(query, 0, limit);
  ordered = false;
  const HalfTables::Effort effort = tables.tables->collect(costs, limit, split.low, inside, near_);
  Work work = scan(query, inside, limit);
  work.keys += effort.keys;
  work.bytes += effort.keys * std::int64_t{sizeof(std::uint16_t)} +
                effort.cells * std::int64_t{sizeof(std::uint32_t)} +
                near_.size * std::int64_t{sizeof(Position)};
  return work;
}

/// near_ in the order of keys, without those that are farther than the budget's farthest.
void CodeSearch::put_in_order(std::int64_t budget, std::int64_t keys) {
  const auto size = static_cast<std::size_t>(near_.size);
  std::fill(levels_.begin(), levels_.end(), 0);
  for (std::size_t i = 0; i < size; ++i) ++levels_[near_.distance[i]];
  std::size_t last = 0;
  for (std::int64_t near = levels_[0]; near < budget;) near += levels_[++last];
  order_.clear();
  for (std::size_t i = 0; i < size; ++i) {
    if (near_.distance[i] <= last)
      order_.push_back(static_cast<std::uint64_t>(near_.keys[i]) << 16 | near_.distance[i]);
  }
  radix_sort(order_, spare_, 16, 16 + std::bit_width(static_cast<std::uint64_t>(keys)));
  near_.size = std::ssize(order_);
  for (std::size_t i = 0; i < order_.size(); ++i) {
    near_.keys[i] = static_cast<Position>(order_[i] >> 16);
    near_.distance[i] = static_cast<std::uint16_t>(order_[i] & 0xffffu);
  }
}

/// rows := the budget's nearest of near_, which are at least as many.
void CodeSearch::choose(const CodeQuery& query, bool ordered, Position offset, std::vector<Position>& rows) {
  if (!ordered) put_in_order(query.budget, query.n);
  select_near({near_.distance.data(), static_cast<std::size_t>(near_.size)},
              {.budget = query.budget, .all_ties = query.all_ties}, 0, rows);
  for (Position& row : rows) row = offset + near_.keys[static_cast<std::size_t>(row)];
}

CodeSearch::Work CodeSearch::nearest(const CodeQuery& query, const CodeTables& tables, Position offset,
                                     std::vector<Position>& rows) {
  rows.clear();
  if (query.n == 0 || query.budget <= 0) return {};
  if (query.n <= kFew && !tables.always) {
    distance_.resize(static_cast<std::size_t>(kFew));
    signature_kernels().distances(query.keys, query.n, query.words, query.queries, query.count, false,
                                  distance_.data());
    select_near({distance_.data(), static_cast<std::size_t>(query.n)},
                {.budget = query.budget, .all_ties = query.all_ties}, offset, rows);
    return {.keys = query.n, .bytes = query.n * query.words * std::int64_t{sizeof(std::uint32_t)}};
  }
  CodeQuery capped = query;
  capped.budget = std::min(query.budget, query.n);
  sample(capped);
  const int farthest = static_cast<int>(std::ssize(levels_) - 1);
  int limit = limit_for(static_cast<double>(capped.budget) / static_cast<double>(capped.n));
  bool ordered = true;
  Work work = search(capped, tables, limit, ordered);
  // A sample that deceived is not trusted again.
  for (int step = std::max(1, farthest / 16); near_.size < capped.budget; step *= 2) {
    limit = std::min(farthest, limit + step);
    const Work more = search(capped, tables, limit, ordered);
    work.keys += more.keys;
    work.bytes += more.bytes;
  }
  choose(capped, ordered, offset, rows);
  return work;
}

}  // namespace lode
