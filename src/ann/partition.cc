// SPDX-License-Identifier: Apache-2.0
#include "ann/partition.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ann/kmeans.h"
#include "base/rng.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kIterations = 20;  // labels have mostly settled; the authors stop at 300 at the latest
constexpr std::int64_t kSamplePerCell = 256;

using Dense = std::vector<float>;  // [points, d]

Dense rows_at(Matrix<const float> x, std::span<const std::int64_t> points) {
  Dense rows(points.size() * static_cast<std::size_t>(x.cols));
  for (std::size_t i = 0; i < points.size(); ++i)
    std::copy_n(x[points[i]].data(), x.cols, rows.data() + static_cast<std::int64_t>(i) * x.cols);
  return rows;
}

std::vector<std::int32_t> directly(Matrix<const float> x, std::int64_t clusters, std::uint64_t seed,
                                   ThreadPool& pool) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  const std::vector<float> centroids =
      spherical_kmeans(x, {.clusters = clusters, .iterations = kIterations, .seed = seed}, pool);
  assign_points(x, centroids, labels, pool);
  return labels;
}

/// Labels of coarse cells, their centroids found on an evenly spaced sample.
std::vector<std::int32_t> cells_of(Matrix<const float> x, std::int64_t cells, std::uint64_t seed,
                                   ThreadPool& pool) {
  const std::int64_t sample = std::min(x.rows, cells * kSamplePerCell);
  std::vector<std::int64_t> points(static_cast<std::size_t>(sample));
  for (std::int64_t i = 0; i < sample; ++i) points[static_cast<std::size_t>(i)] = i * x.rows / sample;
  const Dense rows = rows_at(x, points);
  const std::vector<float> centroids = spherical_kmeans(
      {rows.data(), sample, x.cols}, {.clusters = cells, .iterations = kIterations, .seed = seed}, pool);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  assign_points(x, centroids, labels, pool);
  return labels;
}

/// Renumbers labels in the order in which they first occur, so that none is empty.
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

}  // namespace

Partition partition_by_cosine(Matrix<const float> x, std::int64_t clusters, std::uint64_t seed,
                              ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && clusters >= 1 && clusters <= x.rows);
  if (clusters <= kDirectClusters) return compacted(directly(x, clusters, seed, pool), clusters);
  const auto cells = static_cast<std::int64_t>(std::sqrt(static_cast<double>(clusters)));
  const std::vector<std::int32_t> cell = cells_of(x, cells, seed, pool);
  std::vector<std::vector<std::int64_t>> members(static_cast<std::size_t>(cells));
  for (std::int64_t i = 0; i < x.rows; ++i)
    members[static_cast<std::size_t>(cell[static_cast<std::size_t>(i)])].push_back(i);

  std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
  std::int64_t seen = 0, given = 0;  // points, clusters so far: shares are rounded on their running sum
  for (std::size_t c = 0; c < members.size(); ++c) {
    const std::vector<std::int64_t>& points = members[c];
    // Points that have one direction all fall into one cell, in every round.
    if (std::ssize(points) == x.rows) return compacted(directly(x, clusters, seed, pool), clusters);
    if (points.empty()) continue;
    seen += std::ssize(points);
    const std::int64_t share =
        std::clamp<std::int64_t>(clusters * seen / x.rows - given, 1, std::ssize(points));
    const Dense rows = rows_at(x, points);
    const Partition inside =
        partition_by_cosine({rows.data(), std::ssize(points), x.cols}, share, hash_seed(seed, c), pool);
    for (std::size_t i = 0; i < points.size(); ++i)
      labels[static_cast<std::size_t>(points[i])] = static_cast<std::int32_t>(given) + inside.labels[i];
    given += share;
  }
  return compacted(std::move(labels), given);
}

}  // namespace lode
