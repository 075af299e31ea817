// SPDX-License-Identifier: Apache-2.0
#include "ann/nearest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kQueries = 64, kKeys = 2048;  // of one product: 512 KiB of scores
constexpr std::int64_t kLook = 16;                   // scores whose maximum is tested at once
constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// The best k of a stream of (score, key), found in a buffer of 3 k that is cut when it is full.
class BestOf {
 public:
  explicit BestOf(std::int64_t k) : k_(static_cast<std::size_t>(k)) { kept_.reserve(3 * k_); }

  void take(const float* scores, std::int64_t count, std::int64_t first_key) {
    for (std::int64_t i = 0; i < count; i += kLook) {
      const std::int64_t end = std::min(count, i + kLook);
      bool any = false;
      for (std::int64_t j = i; j < end; ++j) any |= scores[j] > floor_ || kept_.size() < k_;
      if (!any) continue;
      for (std::int64_t j = i; j < end; ++j) push(scores[j], first_key + j);
    }
  }
  void finish(std::int32_t* out) {
    std::sort(kept_.begin(), kept_.end(), better);
    for (std::size_t i = 0; i < k_; ++i) out[i] = kept_[i].second;
  }

 private:
  using Scored = std::pair<float, std::int32_t>;
  static bool better(const Scored& a, const Scored& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  }
  void push(float score, std::int64_t key) {
    // Keys come in rising order: of equal scores the earlier ones are kept.
    if (std::isnan(score)) score = kLowest;
    if (kept_.size() >= k_ && !(score > floor_)) return;
    kept_.emplace_back(score, static_cast<std::int32_t>(key));
    if (kept_.size() < 3 * k_) return;
    std::nth_element(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(k_) - 1, kept_.end(), better);
    kept_.resize(k_);
    floor_ = kept_.back().first;
  }

  std::size_t k_;
  float floor_ = kLowest;  // every key kept is above, once k have been seen
  std::vector<Scored> kept_;
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
    std::vector<BestOf> best(static_cast<std::size_t>(count), BestOf(k));
    for (std::int64_t at = 0; at < keys.rows; at += kKeys) {
      check_cancel();
      const std::int64_t some = std::min(kKeys, keys.rows - at);
      matmul({queries[begin].data(), count, queries.cols}, keys[at].data(), DType::f32, some,
             {scores.data(), count, some}, pool);
      for (std::int64_t q = 0; q < count; ++q)
        best[static_cast<std::size_t>(q)].take(scores.data() + q * some, some, at);
    }
    for (std::int64_t q = 0; q < count; ++q)
      best[static_cast<std::size_t>(q)].finish(found.data() + (begin + q) * k);
  });
  return found;
}

}  // namespace lode
