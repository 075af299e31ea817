// SPDX-License-Identifier: Apache-2.0
// Partitions by cosine: every point has a cluster and every cluster a point, near points share one, and
// threads do not matter, below and above the number of clusters from which two steps are taken.
#include "ann/partition.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "ann/kmeans.h"
#include "base/rng.h"
#include "base/threads.h"

namespace lode {
namespace {

constexpr std::int64_t kDim = 16;

/// n unit vectors around `topics` random directions, point i at topic i mod topics.
std::vector<float> points(std::int64_t n, std::int64_t topics, float noise) {
  std::vector<float> x(static_cast<std::size_t>(n * kDim));
  for (std::int64_t i = 0; i < n; ++i) {
    Rng topic(hash_seed(1, i % topics)), own(hash_seed(2, i));
    double sum = 0;
    for (std::int64_t j = 0; j < kDim; ++j) {
      float& value = x[static_cast<std::size_t>(i * kDim + j)];
      value = static_cast<float>(topic.normal()) + noise * static_cast<float>(own.normal());
      sum += static_cast<double>(value) * value;
    }
    for (std::int64_t j = 0; j < kDim; ++j)
      x[static_cast<std::size_t>(i * kDim + j)] /= static_cast<float>(std::sqrt(sum));
  }
  return x;
}

TEST(Partition, EveryClusterHasAPointWhateverTheirNumber) {
  ThreadPool pool(2);
  const std::vector<float> x = points(1500, 1500, 0.0f);
  for (const std::int64_t clusters : {1, 2, 511, 512, 513, 700, 1500}) {
    const Partition p = partition_points({x.data(), 1500, kDim}, clusters, Nearness::cosine, 3, pool);
    ASSERT_EQ(p.labels.size(), 1500u);
    const std::set<std::int32_t> used(p.labels.begin(), p.labels.end());
    EXPECT_EQ(std::ssize(used), p.clusters) << clusters;
    EXPECT_EQ(*used.begin(), 0);
    EXPECT_EQ(*used.rbegin(), p.clusters - 1);
    EXPECT_LE(p.clusters, clusters);
    EXPECT_GE(p.clusters, clusters * 8 / 10) << clusters;
  }
}

TEST(Partition, TightTopicsAreFound) {
  ThreadPool pool(2);
  constexpr std::int64_t kTopics = 40;
  const std::vector<float> x = points(4000, kTopics, 0.05f);
  const Partition p = partition_points({x.data(), 4000, kDim}, 600, Nearness::cosine, 3, pool);
  // With 15 clusters a topic, hardly a cluster mixes topics.
  std::vector<std::set<std::int64_t>> topics(static_cast<std::size_t>(p.clusters));
  for (std::int64_t i = 0; i < 4000; ++i)
    topics[static_cast<std::size_t>(p.labels[static_cast<std::size_t>(i)])].insert(i % kTopics);
  std::int64_t mixed = 0;
  for (const auto& t : topics) mixed += std::ssize(t) > 1 ? 1 : 0;
  EXPECT_LE(mixed, p.clusters / 20);
}

/// Mean cosine between points and the sums of their clusters.
double tightness(const std::vector<float>& x, std::span<const std::int32_t> labels, std::int64_t clusters) {
  std::vector<double> sums(static_cast<std::size_t>(clusters * kDim));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    for (std::int64_t j = 0; j < kDim; ++j)
      sums[static_cast<std::size_t>(labels[i] * kDim + j)] += x[i * kDim + static_cast<std::size_t>(j)];
  }
  double total = 0;
  for (std::int64_t c = 0; c < clusters; ++c) {
    const auto sum = sums.begin() + c * kDim;
    total += std::sqrt(std::inner_product(sum, sum + kDim, sum, 0.0));
  }
  return total / static_cast<double>(labels.size());
}

// Points without topics are the hardest to cut into cells: most of them are at a border.
TEST(Partition, TwoStepsFindAsTightClustersAsOne) {
  constexpr std::int64_t kPoints = 12000, kClusters = 600;
  ThreadPool pool(2);
  const std::vector<float> x = points(kPoints, kPoints, 0.0f);
  const Matrix<const float> all(x.data(), kPoints, kDim);
  const Partition p = partition_points(all, kClusters, Nearness::cosine, 3, pool);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(kPoints));
  assign_points(all, spherical_kmeans(all, {.clusters = kClusters, .iterations = 20, .seed = 3}, pool),
                labels, pool);
  EXPECT_GE(tightness(x, p.labels, p.clusters),
            tightness(x, labels, kClusters) - 0.004);  // without moves 0.026 less
}

// All points have one direction, so that cosines tell nothing: 40 lengths, each with its clusters.
TEST(Partition, DistancesSeeLengths) {
  ThreadPool pool(2);
  constexpr std::int64_t kPoints = 4000, kLengths = 40;
  std::vector<float> x(static_cast<std::size_t>(kPoints * kDim), 1.0f);
  for (std::int64_t i = 0; i < kPoints; ++i) {
    Rng own(hash_seed(5, i));
    const float length = static_cast<float>(i % kLengths) - 20.0f + 0.05f * static_cast<float>(own.normal());
    for (std::int64_t j = 0; j + 1 < kDim; ++j) x[static_cast<std::size_t>(i * kDim + j)] = length;
  }
  for (const std::int64_t clusters : {300, 600}) {
    const Partition p = partition_points({x.data(), kPoints, kDim}, clusters, Nearness::distance, 3, pool);
    EXPECT_GE(p.clusters, clusters / 2);
    std::vector<std::set<std::int64_t>> lengths(static_cast<std::size_t>(p.clusters));
    for (std::int64_t i = 0; i < kPoints; ++i)
      lengths[static_cast<std::size_t>(p.labels[static_cast<std::size_t>(i)])].insert(i % kLengths);
    for (const auto& own : lengths) EXPECT_EQ(own.size(), 1u) << clusters;
  }
}

TEST(Partition, ThreadsDoNotMatter) {
  const std::vector<float> x = points(2000, 100, 0.3f);
  ThreadPool one(1), three(3);
  for (const std::int64_t clusters : {100, 600}) {
    EXPECT_EQ(partition_points({x.data(), 2000, kDim}, clusters, Nearness::cosine, 3, one).labels,
              partition_points({x.data(), 2000, kDim}, clusters, Nearness::cosine, 3, three).labels);
  }
}

TEST(Partition, PointsThatAreEqualOrZero) {
  ThreadPool pool(2);
  const std::vector<float> equal(700 * kDim, 0.25f), zero(700 * kDim, 0.0f);
  for (const std::vector<float>* x : {&equal, &zero}) {
    for (const std::int64_t clusters : {1, 5, 600, 700}) {
      const Partition p = partition_points({x->data(), 700, kDim}, clusters, Nearness::cosine, 3, pool);
      EXPECT_GE(p.clusters, 1);
      const std::set<std::int32_t> used(p.labels.begin(), p.labels.end());
      EXPECT_EQ(std::ssize(used), p.clusters);
    }
  }
}

}  // namespace
}  // namespace lode
