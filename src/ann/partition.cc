// SPDX-License-Identifier: Apache-2.0
#include "ann/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kIterations = 20;  // labels have mostly settled; the authors stop at 300 at the latest
constexpr std::int64_t kSamplePerCell = 256;
constexpr std::int64_t kNearest = 128;  // clusters that a point is compared with
constexpr int kRefinements = 8;
constexpr int kRefinementsPerSearch = 4;  // of what is nearest, which costs clusters times clusters
constexpr std::int64_t kRowsAtOnce = 8;

using Dense = std::vector<float>;  // [points, d]

Dense rows_at(Matrix<const float> x, std::span<const std::int64_t> points) {
  Dense rows(points.size() * static_cast<std::size_t>(x.cols));
  for (std::size_t i = 0; i < points.size(); ++i)
    std::copy_n(x[points[i]].data(), x.cols, rows.data() + static_cast<std::int64_t>(i) * x.cols);
  return rows;
}

std::vector<std::int32_t> directly(Matrix<const float> x, std::int64_t clusters, Nearness nearness,
                                   std::uint64_t seed, ThreadPool& pool) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  const std::vector<float> centroids = spherical_kmeans(
      x, {.clusters = clusters, .iterations = kIterations, .seed = seed, .nearness = nearness}, pool);
  assign_points(x, centroids, labels, pool);
  return labels;
}

/// Labels of coarse cells, their centroids found on an evenly spaced sample.
std::vector<std::int32_t> cells_of(Matrix<const float> x, std::int64_t cells, Nearness nearness,
                                   std::uint64_t seed, ThreadPool& pool) {
  const std::int64_t sample = std::min(x.rows, cells * kSamplePerCell);
  std::vector<std::int64_t> points(static_cast<std::size_t>(sample));
  for (std::int64_t i = 0; i < sample; ++i) points[static_cast<std::size_t>(i)] = i * x.rows / sample;
  const Dense rows = rows_at(x, points);
  const std::vector<float> centroids = spherical_kmeans(
      {rows.data(), sample, x.cols},
      {.clusters = cells, .iterations = kIterations, .seed = seed, .nearness = nearness}, pool);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  assign_points(x, centroids, labels, pool);
  return labels;
}

/// Lloyd's iterations in which a point is compared with the clusters nearest its own only, which costs points
/// times kNearest instead of points times clusters ("k2-means", Agustsson et al. 2017).
class Refinement {
 public:
  Refinement(Matrix<const float> x, Partition start, Nearness nearness, ThreadPool& pool)
      : x_(x), partition_(std::move(start)), nearness_(nearness), pool_(pool) {}

  Partition run() {
    for (int i = 0; i < kRefinements; ++i) {
      sort_points();
      update_centroids();
      if (i % kRefinementsPerSearch == 0) find_nearest();
      move_points();
    }
    return std::move(partition_);
  }

 private:
  std::int64_t size_of(std::int64_t c) const {
    return first_[static_cast<std::size_t>(c + 1)] - first_[static_cast<std::size_t>(c)];
  }
  std::span<const std::int64_t> points_of(std::int64_t c) const {
    return std::span(points_).subspan(static_cast<std::size_t>(first_[static_cast<std::size_t>(c)]),
                                      static_cast<std::size_t>(size_of(c)));
  }

  void sort_points() {
    first_.assign(static_cast<std::size_t>(partition_.clusters + 1), 0);
    for (const std::int32_t label : partition_.labels) ++first_[static_cast<std::size_t>(label + 1)];
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    std::vector<std::int64_t> next(first_.begin(), first_.end() - 1);
    points_.resize(partition_.labels.size());
    for (std::size_t i = 0; i < partition_.labels.size(); ++i)
      points_[static_cast<std::size_t>(next[static_cast<std::size_t>(partition_.labels[i])]++)] =
          static_cast<std::int64_t>(i);
  }

  /// A cluster that lost its points stays where it was.
  void update_centroids() {
    centroids_.resize(static_cast<std::size_t>(partition_.clusters * x_.cols));
    pool_.for_each(partition_.clusters, [&](std::int64_t c, int) {
      if (size_of(c) == 0) return;
      Dense sum(static_cast<std::size_t>(x_.cols));
      for (const std::int64_t point : points_of(c)) {
        for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += x_[point][j];
      }
      if (centre(sum, nearness_)) std::copy(sum.begin(), sum.end(), centroids_.begin() + c * x_.cols);
    });
  }

  /// The clusters whose centroids are nearest each one's, itself among them, by rising number.
  void find_nearest() {
    const std::int64_t clusters = partition_.clusters, d = x_.cols;
    const std::int64_t count = std::min(kNearest, clusters);
    nearest_.resize(static_cast<std::size_t>(clusters * count));
    pool_.for_each((clusters + kRowsAtOnce - 1) / kRowsAtOnce, [&](std::int64_t item, int) {
      check_cancel();
      const std::int64_t begin = item * kRowsAtOnce, end = std::min(clusters, begin + kRowsAtOnce);
      Dense products(static_cast<std::size_t>(kRowsAtOnce * clusters));
      std::vector<std::int32_t> order(static_cast<std::size_t>(clusters));
      Dense rows(centroids_.begin() + begin * d, centroids_.begin() + end * d);
      for (std::int64_t c = begin; nearness_ == Nearness::distance && c < end; ++c)
        rows[static_cast<std::size_t>((c - begin + 1) * d - 1)] = 1.0f;  // as a point
      kernels().gemv(rows.data(), static_cast<int>(end - begin), centroids_.data(), DType::f32, d, 0,
                     clusters, products.data(), clusters);
      for (std::int64_t c = begin; c < end; ++c) {
        float* const product = products.data() + (c - begin) * clusters;
        product[c] = std::numeric_limits<float>::infinity();
        std::iota(order.begin(), order.end(), 0);
        std::nth_element(order.begin(), order.begin() + count - 1, order.end(), [&](auto a, auto b) {
          return product[a] > product[b] || (product[a] == product[b] && a < b);
        });
        std::sort(order.begin(), order.begin() + count);
        std::copy_n(order.begin(), count, nearest_.begin() + c * count);
      }
    });
  }

  void move_points() {
    const std::int64_t clusters = partition_.clusters, d = x_.cols;
    const std::int64_t count = std::min(kNearest, clusters);
    pool_.for_each(clusters, [&](std::int64_t c, int) {
      check_cancel();
      if (size_of(c) == 0) return;
      const std::int32_t* const near = nearest_.data() + c * count;
      Dense candidates(static_cast<std::size_t>(count * d));
      for (std::int64_t i = 0; i < count; ++i)
        std::copy_n(centroids_.data() + near[i] * d, d, candidates.data() + i * d);
      const Dense rows = rows_at(x_, points_of(c));
      std::vector<std::int32_t> labels(static_cast<std::size_t>(size_of(c)));
      kernels().assign(rows.data(), size_of(c), candidates.data(), count, static_cast<int>(d), labels.data(),
                       nullptr);
      for (std::size_t i = 0; i < labels.size(); ++i)
        partition_.labels[static_cast<std::size_t>(points_of(c)[i])] = near[labels[i]];
    });
  }

  Matrix<const float> x_;
  Partition partition_;
  Nearness nearness_;
  ThreadPool& pool_;
  std::vector<std::int64_t> first_, points_;  // [clusters + 1], [n] by cluster
  Dense centroids_;                           // [clusters, d]
  std::vector<std::int32_t> nearest_;         // [clusters, kNearest]
};

/// Cells first, then clusters inside each cell.
Partition in_two_steps(Matrix<const float> x, std::int64_t clusters, Nearness nearness, std::uint64_t seed,
                       ThreadPool& pool) {
  const auto cells = static_cast<std::int64_t>(std::sqrt(static_cast<double>(clusters)));
  const std::vector<std::int32_t> cell = cells_of(x, cells, nearness, seed, pool);
  std::vector<std::vector<std::int64_t>> members(static_cast<std::size_t>(cells));
  for (std::int64_t i = 0; i < x.rows; ++i)
    members[static_cast<std::size_t>(cell[static_cast<std::size_t>(i)])].push_back(i);

  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  std::int64_t seen = 0, given = 0;  // points, clusters so far: shares are rounded on their running sum
  for (std::size_t c = 0; c < members.size(); ++c) {
    const std::vector<std::int64_t>& points = members[c];
    // Points that have one direction all fall into one cell, in every round.
    if (std::ssize(points) == x.rows) return compacted(directly(x, clusters, nearness, seed, pool), clusters);
    if (points.empty()) continue;
    seen += std::ssize(points);
    const std::int64_t share =
        std::clamp<std::int64_t>(clusters * seen / x.rows - given, 1, std::ssize(points));
    const Dense rows = rows_at(x, points);
    const Partition inside = partition_points({rows.data(), std::ssize(points), x.cols}, share, nearness,
                                              hash_seed(seed, c), pool);
    for (std::size_t i = 0; i < points.size(); ++i)
      labels[static_cast<std::size_t>(points[i])] = static_cast<std::int32_t>(given) + inside.labels[i];
    given += share;
  }
  return compacted(std::move(labels), given);
}

}  // namespace

Partition compacted(std::vector<std::int32_t> labels, std::int64_t most) {
  std::vector<std::int32_t> number(static_cast<std::size_t>(most), -1);
  std::int32_t next = 0;
  for (std::int32_t& label : labels) {
    std::int32_t& known = number[static_cast<std::size_t>(label)];
    if (known < 0) known = next++;
    label = known;
  }
  return {next, std::move(labels)};
}

Partition partition_points(Matrix<const float> x, std::int64_t clusters, Nearness nearness,
                           std::uint64_t seed, ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && clusters >= 1 && clusters <= x.rows);
  if (clusters <= kDirectClusters) return compacted(directly(x, clusters, nearness, seed, pool), clusters);
  Partition refined = Refinement(x, in_two_steps(x, clusters, nearness, seed, pool), nearness, pool).run();
  return compacted(std::move(refined.labels), refined.clusters);
}

}  // namespace lode
