// SPDX-License-Identifier: Apache-2.0
#include "ann/code_search.h"

#include <algorithm>
#include <cmath>

#include "ann/counting_select.h"
#include "kernels/signature.h"

namespace lode {

namespace {

constexpr std::int64_t kBlock = 16384;  // keys whose distances stay in the second-level cache
constexpr std::int64_t kFew = 32768;    // keys that are not worth a sample
constexpr std::int64_t kRun = 16;  // keys of a sample that lie side by side: a cache line of 32-bit codes
constexpr std::int64_t kLeastSample = 2048, kMostSample = 16384, kKeysPerSample = 64;

}  // namespace

/// levels_ := the distances of runs of keys that are spread evenly.
void CodeSearch::sample(const CodeQuery& query) {
  const std::int64_t wanted = std::clamp(query.n / kKeysPerSample, kLeastSample, kMostSample);
  const std::int64_t runs = std::max<std::int64_t>(1, std::min(wanted, query.n) / kRun);
  sampled_.clear();
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t first = run * query.n / runs, last = std::min(query.n, first + kRun);
    sampled_.insert(sampled_.end(), query.keys + first * query.words, query.keys + last * query.words);
  }
  const std::int64_t size = std::ssize(sampled_) / query.words;
  distance_.resize(static_cast<std::size_t>(std::max(size, kBlock)));
  signature_kernels().distances(sampled_.data(), size, query.words, query.queries, query.count, false,
                                distance_.data());
  levels_.assign(static_cast<std::size_t>(query.count * query.words * 32 + 1), 0);
  for (std::int64_t i = 0; i < size; ++i) ++levels_[distance_[static_cast<std::size_t>(i)]];
}

/// The least level that so many of the sample do not exceed; the farthest that there is if none.
std::int64_t CodeSearch::level_for(std::int64_t sampled) const {
  std::int64_t level = 0;
  for (std::int64_t keys = levels_[0]; keys < sampled && level + 1 < std::ssize(levels_);)
    keys += levels_[static_cast<std::size_t>(++level)];
  return level;
}

/// near_ := the keys that do not exceed `limit`.
void CodeSearch::scan(const CodeQuery& query, std::int64_t limit, Position offset) {
  const SignatureKernels& table = signature_kernels();
  found_ = 0;
  for (std::int64_t begin = 0; begin < query.n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, query.n - begin);
    if (std::ssize(near_) < found_ + count) {
      near_.resize(static_cast<std::size_t>(2 * found_ + kBlock));
      level_.resize(near_.size());
    }
    table.distances(query.keys + begin * query.words, count, query.words, query.queries, query.count, false,
                    distance_.data());
    Position* const rows = near_.data() + found_;
    const std::int64_t some = table.collect_up_to(distance_.data(), count, static_cast<std::uint16_t>(limit),
                                                  static_cast<Position>(begin), rows);
    for (std::int64_t i = 0; i < some; ++i) {
      level_[static_cast<std::size_t>(found_ + i)] = distance_[static_cast<std::size_t>(rows[i] - begin)];
      rows[i] += offset;
    }
    found_ += some;
  }
}

void CodeSearch::nearest(const CodeQuery& query, Position offset, std::vector<Position>& rows) {
  rows.clear();
  if (query.n == 0 || query.budget <= 0) return;
  if (query.n <= kFew) {
    distance_.resize(static_cast<std::size_t>(std::max(query.n, kBlock)));
    signature_kernels().distances(query.keys, query.n, query.words, query.queries, query.count, false,
                                  distance_.data());
    return select_near({distance_.data(), static_cast<std::size_t>(query.n)},
                       {.budget = query.budget, .all_ties = query.all_ties}, offset, rows);
  }
  CodeQuery capped = query;
  capped.budget = std::min(query.budget, query.n);
  sample(capped);
  const std::int64_t farthest = std::ssize(levels_) - 1;
  const double expected = static_cast<double>(capped.budget) * static_cast<double>(sampled_.size()) /
                          static_cast<double>(capped.n * capped.words);
  // Three deviations more than expected are most often enough; a sample that deceives is not trusted again.
  std::int64_t limit = level_for(static_cast<std::int64_t>(expected + 3.0 * std::sqrt(expected) + 1.0));
  for (scan(capped, limit, offset); found_ < capped.budget; scan(capped, limit, offset))
    limit = std::min(farthest, limit + std::max<std::int64_t>(1, farthest / 16));
  select_near({level_.data(), static_cast<std::size_t>(found_)},
              {.budget = capped.budget, .all_ties = capped.all_ties}, 0, rows);
  for (Position& row : rows) row = near_[static_cast<std::size_t>(row)];
}

}  // namespace lode
