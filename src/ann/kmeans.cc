// SPDX-License-Identifier: Apache-2.0
// Lloyd's iterations with the centroids kept on the unit sphere, as the "spherical" k-means of Faiss (Douze
// et al. 2024) that SAAP uses: centroids are normalised sums of the points as they are, labels are the
// largest inner products. Differs from Faiss: an empty cluster takes a random point of a cluster that has
// more than one, instead of half of a large cluster. For distances, points and centroids are lifted
// (kmeans.h); the rest is the same.
#include "ann/kmeans.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kPointsPerItem = 256;

class Lloyd {
 public:
  Lloyd(Matrix<const float> x, const KMeansOptions& options, LloydSteps& steps)
      : x_(x),
        options_(options),
        steps_(steps),
        rng_(hash_seed(options.seed, options.clusters)),
        centroids_(static_cast<std::size_t>(options.clusters * x.cols)),
        labels_(static_cast<std::size_t>(x.rows), -1),
        order_(static_cast<std::size_t>(x.rows)),
        offsets_(static_cast<std::size_t>(options.clusters + 1)) {}

  std::vector<float> run() {
    start();
    std::vector<std::int32_t> previous;
    for (int i = 0; i < options_.iterations; ++i) {
      previous = labels_;
      check_cancel();
      steps_.assign(centroids_, labels_);
      if (labels_ == previous) break;
      sort_by_label();
      steps_.update(order_, offsets_, centroids_);
      refill_empty();
    }
    return std::move(centroids_);
  }

 private:
  std::span<float> centroid(std::int64_t c) {
    return std::span(centroids_)
        .subspan(static_cast<std::size_t>(c * x_.cols), static_cast<std::size_t>(x_.cols));
  }
  std::int64_t size_of(std::int64_t c) const {
    return offsets_[static_cast<std::size_t>(c + 1)] - offsets_[static_cast<std::size_t>(c)];
  }
  void set_to_point(std::int64_t c, std::int64_t point) {
    std::copy_n(x_[point].data(), x_.cols, centroid(c).data());
    centre(centroid(c), options_.nearness);
  }

  /// C distinct random points, the front of a shuffled list.
  void start() {
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
    for (std::int64_t c = 0; c < options_.clusters; ++c) {
      const auto pick = c + static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(x_.rows - c)));
      std::swap(order_[static_cast<std::size_t>(c)], order_[static_cast<std::size_t>(pick)]);
      set_to_point(c, order_[static_cast<std::size_t>(c)]);
    }
  }

  /// Points of cluster c, rising, at order_[offsets_[c] .. offsets_[c + 1]).
  void sort_by_label() {
    std::fill(offsets_.begin(), offsets_.end(), std::int64_t{0});
    for (const std::int32_t label : labels_) ++offsets_[static_cast<std::size_t>(label + 1)];
    std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());
    std::vector<std::int64_t> next(offsets_.begin(), offsets_.end() - 1);
    for (std::int64_t i = 0; i < x_.rows; ++i) {
      order_[static_cast<std::size_t>(
          next[static_cast<std::size_t>(labels_[static_cast<std::size_t>(i)])]++)] = i;
    }
  }

  void refill_empty() {
    constexpr int kDraws = 32;  // all points may sit in clusters of one; then the cluster stays empty
    for (std::int64_t c = 0; c < options_.clusters; ++c) {
      for (int draw = 0; draw < kDraws && size_of(c) == 0; ++draw) {
        const auto point = static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(x_.rows)));
        if (size_of(labels_[static_cast<std::size_t>(point)]) < 2) continue;
        set_to_point(c, point);
        break;
      }
    }
  }

  Matrix<const float> x_;
  const KMeansOptions& options_;
  LloydSteps& steps_;
  Rng rng_;
  std::vector<float> centroids_;       // [C, d]
  std::vector<std::int32_t> labels_;   // [n]
  std::vector<std::int64_t> order_;    // [n]
  std::vector<std::int64_t> offsets_;  // [C + 1]
};

class StepsOnCpu final : public LloydSteps {
 public:
  StepsOnCpu(Matrix<const float> x, Nearness nearness, ThreadPool& pool)
      : x_(x), nearness_(nearness), pool_(pool) {}

  void assign(std::span<const float> centroids, std::span<std::int32_t> labels) override {
    assign_points(x_, centroids, labels, pool_);
  }

  void update(std::span<const std::int64_t> order, std::span<const std::int64_t> offsets,
              std::span<float> centroids) override {
    const auto d = static_cast<std::size_t>(x_.cols);
    pool_.for_each(std::ssize(offsets) - 1, [&](std::int64_t c, int) {
      const auto at = static_cast<std::size_t>(c);
      const auto begin = static_cast<std::size_t>(offsets[at]),
                 end = static_cast<std::size_t>(offsets[at + 1]);
      if (begin == end) return;
      std::vector<float> sum(d, 0.0f);
      for (const std::int64_t i : order.subspan(begin, end - begin)) {
        const std::span<const float> point = x_[i];
        for (std::size_t j = 0; j < d; ++j) sum[j] += point[j];
      }
      if (centre(sum, nearness_))
        std::copy(sum.begin(), sum.end(),
                  centroids.subspan(at * d).begin());  // sums beyond float32 change nothing
    });
  }

 private:
  Matrix<const float> x_;
  Nearness nearness_;
  ThreadPool& pool_;
};

}  // namespace

bool centre(std::span<float> sum, Nearness nearness) {
  const std::size_t d = nearness == Nearness::distance ? sum.size() - 1 : sum.size();
  double square = 0.0;
  for (std::size_t j = 0; j < d; ++j) square += static_cast<double>(sum[j]) * sum[j];
  if (!std::isfinite(square)) return false;
  double factor = square > 0.0 ? 1.0 / std::sqrt(square) : 0.0;
  if (nearness == Nearness::distance) {
    factor = 1.0 / sum[d];  // the sum of as many ones as there are points
    sum[d] = static_cast<float>(-0.5 * square * factor * factor);
  }
  for (std::size_t j = 0; j < d; ++j) sum[j] = static_cast<float>(sum[j] * factor);
  return true;
}

std::vector<float> spherical_kmeans(Matrix<const float> x, const KMeansOptions& options, ThreadPool& pool) {
  StepsOnCpu steps(x, options.nearness, pool);
  return spherical_kmeans(x, options, steps);
}

std::vector<float> spherical_kmeans(Matrix<const float> x, const KMeansOptions& options, LloydSteps& steps) {
  LODE_ASSERT(options.clusters >= 1 && options.clusters <= x.rows && x.stride == x.cols);
  return Lloyd(x, options, steps).run();
}

void assign_points(Matrix<const float> x, std::span<const float> centroids, std::span<std::int32_t> labels,
                   ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && std::ssize(labels) == x.rows && std::ssize(centroids) % x.cols == 0);
  pool.for_each((x.rows + kPointsPerItem - 1) / kPointsPerItem, [&](std::int64_t item, int) {
    check_cancel();
    const std::int64_t begin = item * kPointsPerItem, count = std::min(kPointsPerItem, x.rows - begin);
    float best[kPointsPerItem];
    kernels().assign(x[begin].data(), count, centroids.data(), std::ssize(centroids) / x.cols,
                     static_cast<int>(x.cols), labels.data() + begin, best);
  });
}

}  // namespace lode
