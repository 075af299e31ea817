// SPDX-License-Identifier: Apache-2.0
#include "ann/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>
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

/// What a scan of a point's cluster reads, up to a factor: least where all clusters are alike.
double unevenness(const std::vector<std::int64_t>& counts) {
  double sum = 0;
  for (const std::int64_t count : counts) sum += static_cast<double>(count) * static_cast<double>(count);
  return sum;
}

/// Where a cluster holds e times its even share, its offset falls by step x log e. Empty clusters must not
/// come by all keys at once: e counts as at least 1 / kMostExcess, and at most kMostExcess.
std::vector<float> moved_against_excess(std::vector<float> offsets, const std::vector<std::int64_t>& counts,
                                        double step) {
  constexpr double kMostExcess = 4;
  const double even = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})) /
                      static_cast<double>(counts.size());
  for (std::size_t c = 0; c < offsets.size(); ++c) {
    const double excess = std::clamp(static_cast<double>(counts[c]) / even, 1.0 / kMostExcess, kMostExcess);
    offsets[c] -= static_cast<float>(step * std::log(excess));
  }
  return offsets;
}

}  // namespace

std::vector<float> balanced_offsets(Matrix<const float> x, std::span<const float> centroids, double strength,
                                    ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && x.rows >= 1 && std::ssize(centroids) % x.cols == 0);
  std::vector<float> offsets(centroids.size() / static_cast<std::size_t>(x.cols), 0.0f);
  if (strength <= 0 || offsets.size() < 2) return offsets;
  Assignment now = assign_with(x, centroids, offsets, pool);
  double uneven = unevenness(now.counts), step = now.gap;
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<float> moved = moved_against_excess(offsets, now.counts, step);
    Assignment then = assign_with(x, centroids, moved, pool);
    const double found = unevenness(then.counts);
    step *= found < uneven ? 1.25 : 0.5;
    if (found >= uneven) continue;
    offsets = moved, now = std::move(then), uneven = found;
  }
  for (float& offset : offsets) offset *= static_cast<float>(strength);
  return offsets;
}

}  // namespace lode
