// SPDX-License-Identifier: Apache-2.0
#include "ann/nearest.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/score_order.h"
#include "kernels/select/filter_above.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kQueries = 64, kKeys = 2048;  // of one product: 512 KiB of scores
constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// The best k of a stream of scored keys, found in a buffer that is cut when it is full.
class BestOf {
 public:
  explicit BestOf(std::int64_t k) : k_(static_cast<std::size_t>(k)) {}

  /// `places` has room for as many as there are scores.
  void take(std::span<const float> scores, std::int64_t first_key, std::span<std::int32_t> places) {
    if (kept_.empty()) raise(scores);
    const std::int64_t good =
        filter_above_kernels().collect(scores.data(), std::ssize(scores), least_, places.data());
    for (const std::int32_t at : places.first(static_cast<std::size_t>(good))) {
      const auto key = static_cast<std::uint32_t>(first_key + at);
      kept_.push_back(std::uint64_t{ordered(scores[static_cast<std::size_t>(at)])} << 32 | ~key);
    }
    if (kept_.size() > kSlack * k_) cut();
  }
  /// At least k were taken.
  void finish(std::int32_t* out) {
    cut();
    std::sort(kept_.begin(), kept_.end(), std::greater<>());
    for (std::size_t i = 0; i < k_; ++i)
      out[i] = static_cast<std::int32_t>(~static_cast<std::uint32_t>(kept_[i]));
  }

 private:
  static constexpr std::size_t kSlack = 4, kGroups = 2;  // for each of k

  /// Of the first scores k or more reach the k-th largest of disjoint groups' maxima, and few others do.
  void raise(std::span<const float> scores) {
    const std::size_t groups = kGroups * k_;
    if (scores.size() < groups) return;
    std::vector<float> most(groups, kLowest);
    for (std::size_t at = 0; at + groups <= scores.size(); at += groups) {
      for (std::size_t j = 0; j < groups; ++j)
        most[j] = scores[at + j] > most[j] ? scores[at + j] : most[j];  // NaN stays out
    }
    const auto last = most.begin() + static_cast<std::ptrdiff_t>(k_) - 1;
    std::nth_element(most.begin(), last, most.end(), std::greater<>());
    least_ = *last;
  }
  void cut() {
    if (kept_.size() <= k_) return;
    const auto last = kept_.begin() + static_cast<std::ptrdiff_t>(k_) - 1;
    std::nth_element(kept_.begin(), last, kept_.end(), std::greater<>());
    kept_.resize(k_);
    least_ = score_of(static_cast<std::uint32_t>(kept_.back() >> 32));
  }

  std::size_t k_;
  float least_ = kLowest;            // lower scores count no more
  std::vector<std::uint64_t> kept_;  // score, then the key: the earlier one is the larger number
};

}  // namespace

std::vector<std::int32_t> nearest_keys(Matrix<const float> queries, Matrix<const float> keys, std::int64_t k,
                                       ThreadPool& pool) {
  LODE_ASSERT(queries.stride == queries.cols && keys.stride == keys.cols && queries.cols == keys.cols);
  k = std::min(k, keys.rows);
  std::vector<std::int32_t> found(static_cast<std::size_t>(queries.rows * k));
  if (k == 0) return found;
  pool.for_each((queries.rows + kQueries - 1) / kQueries, [&](std::int64_t item, int) {
    const std::int64_t begin = item * kQueries, count = std::min(kQueries, queries.rows - begin);
    std::vector<float> scores(static_cast<std::size_t>(count * kKeys));
    std::vector<std::int32_t> places(static_cast<std::size_t>(kKeys));
    std::vector<BestOf> best(static_cast<std::size_t>(count), BestOf(k));
    for (std::int64_t at = 0; at < keys.rows; at += kKeys) {
      check_cancel();
      const std::int64_t some = std::min(kKeys, keys.rows - at);
      matmul({queries[begin].data(), count, queries.cols}, keys[at].data(), DType::f32, some,
             {scores.data(), count, some}, pool);
      for (std::int64_t q = 0; q < count; ++q)
        best[static_cast<std::size_t>(q)].take({scores.data() + q * some, static_cast<std::size_t>(some)}, at,
                                               places);
    }
    for (std::int64_t q = 0; q < count; ++q)
      best[static_cast<std::size_t>(q)].finish(found.data() + (begin + q) * k);
  });
  return found;
}

}  // namespace lode
