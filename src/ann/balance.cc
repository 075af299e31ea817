// SPDX-License-Identifier: Apache-2.0
#include "ann/balance.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/sgemm.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kPoints = 128;  // of one thread's item
constexpr int kRounds = 60;

struct Assignment {
  std::vector<std::int64_t> counts;  // [C]
  double gap = 0;                    // mean distance from the best to the second score
};

Assignment assign_with(Matrix<const float> x, std::span<const float> centroids,
                       const std::vector<float>& offsets, ThreadPool& pool) {
  const std::int64_t clusters = std::ssize(offsets), d = x.cols, items = (x.rows + kPoints - 1) / kPoints;
  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  std::vector<double> gaps(static_cast<std::size_t>(items), 0.0);
  pool.for_each(items, [&](std::int64_t item, int) {
    check_cancel();
    const std::int64_t begin = item * kPoints, some = std::min(kPoints, x.rows - begin);
    std::vector<float> scores(static_cast<std::size_t>(some * clusters));
    sgemm(some, clusters, d, {x[begin].data(), d}, {centroids.data(), d, true}, 0.0f, scores.data(),
          clusters);
    for (std::int64_t i = 0; i < some; ++i) {
      float best = -INFINITY, second = -INFINITY;
      for (std::int64_t c = 0; c < clusters; ++c) {
        const float score =
            scores[static_cast<std::size_t>(i * clusters + c)] + offsets[static_cast<std::size_t>(c)];
        if (score > best) {
          second = std::exchange(best, score);
          labels[static_cast<std::size_t>(begin + i)] = static_cast<std::int32_t>(c);
        } else {
          second = std::max(second, score);
        }
      }
      gaps[static_cast<std::size_t>(item)] += best - second;
    }
  });
  Assignment result = {.counts = std::vector<std::int64_t>(static_cast<std::size_t>(clusters), 0)};
  for (const std::int32_t label : labels) ++result.counts[static_cast<std::size_t>(label)];
  for (const double gap : gaps) result.gap += gap / static_cast<double>(x.rows);
  return result;
}

}  // namespace

std::vector<float> balanced_offsets(Matrix<const float> x, std::span<const float> centroids, double strength,
                                    ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && x.rows >= 1 && std::ssize(centroids) % x.cols == 0);
  std::vector<float> offsets(centroids.size() / static_cast<std::size_t>(x.cols), 0.0f);
  if (strength <= 0 || offsets.size() < 2) return offsets;
  const double even = static_cast<double>(x.rows) / static_cast<double>(offsets.size());
  double unit = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Assignment now = assign_with(x, centroids, offsets, pool);
    if (round == 0) unit = now.gap;
    const double step = unit / (1.0 + 0.1 * round);
    for (std::size_t c = 0; c < offsets.size(); ++c) {
      const double excess = std::log((static_cast<double>(now.counts[c]) + 0.5) / (even + 0.5));
      offsets[c] -= static_cast<float>(step * excess);
    }
  }
  for (float& offset : offsets) offset *= static_cast<float>(strength);
  return offsets;
}

}  // namespace lode
