// SPDX-License-Identifier: Apache-2.0
// Made-up keys and queries that lie apart: the same for a seed, and an inverted file must look through far
// more keys for a query's best ones than for those of a key that asks.
#include "lab/bench/ood_vectors.h"

#include <gtest/gtest.h>

#include <vector>

#include "ann/kmeans.h"
#include "ann/nearest.h"
#include "base/threads.h"
#include "lab/bench/common.h"

namespace lode {
namespace {

constexpr int kDim = 64;
constexpr std::int64_t kKeys = 16384, kLists = 128, kQueries = 32, kBest = 16;

TEST(OodVectors, AreTheSameForASeedAndNotForAnother) {
  std::vector<std::vector<float>> made;
  for (const std::uint64_t seed : {7, 7, 8}) {
    Rng rng(seed);
    const OodVectors vectors(4, 2, kDim, rng);
    std::vector<float> x(4 * kDim);
    vectors.key(0, rng, x.data());
    vectors.key(1, rng, x.data() + kDim);
    vectors.query(0, rng, x.data() + 2 * kDim);
    vectors.query(3, rng, x.data() + 3 * kDim);
    made.push_back(x);
  }
  EXPECT_EQ(made[0], made[1]);
  EXPECT_NE(made[0], made[2]);
}

/// Share of the keys in the lists that an inverted file opens for 0.9 of the best keys, centroids best first.
double scanned(Matrix<const float> asking, Matrix<const float> keys, const std::vector<float>& centroids,
               const std::vector<std::int32_t>& labels, ThreadPool& pool) {
  const auto best = nearest_keys(asking, keys, kBest, pool);
  const auto order = nearest_keys(asking, {centroids.data(), kLists, kDim}, kLists, pool);
  std::vector<double> size(kLists, 0), hits(kLists, 0), cost(kLists, 0);
  for (const std::int32_t label : labels) size[static_cast<std::size_t>(label)] += 1.0 / kKeys;
  for (std::int64_t q = 0; q < asking.rows; ++q) {
    double found = 0, seen = 0;
    for (std::int64_t rank = 0; rank < kLists; ++rank) {
      const std::int32_t list = order[static_cast<std::size_t>(q * kLists + rank)];
      for (std::int64_t i = 0; i < kBest; ++i)
        found += labels[static_cast<std::size_t>(best[static_cast<std::size_t>(q * kBest + i)])] == list;
      seen += size[static_cast<std::size_t>(list)];
      hits[static_cast<std::size_t>(rank)] += found / static_cast<double>(asking.rows * kBest);
      cost[static_cast<std::size_t>(rank)] += seen / static_cast<double>(asking.rows);
    }
  }
  std::size_t rank = 0;
  while (rank + 1 < cost.size() && hits[rank] < 0.9) ++rank;
  return cost[rank];
}

TEST(OodVectors, QueriesLieApartFromKeys) {
  ThreadPool pool(2);
  Rng rng(3);
  const OodVectors vectors(2, 1, kDim, rng);
  std::vector<float> keys(kKeys * kDim), queries(kQueries * kDim);
  for (std::int64_t i = 0; i < kKeys; ++i) vectors.key(0, rng, keys.data() + i * kDim);
  for (std::int64_t i = 0; i < kQueries; ++i)
    vectors.query(static_cast<int>(i % 2), rng, queries.data() + i * kDim);
  const Matrix<const float> all(keys.data(), kKeys, kDim);
  const auto centroids = spherical_kmeans(all, {.clusters = kLists, .iterations = 5, .seed = 1}, pool);
  std::vector<std::int32_t> labels(kKeys);
  assign_points(all, centroids, labels, pool);
  const double by_query = scanned({queries.data(), kQueries, kDim}, all, centroids, labels, pool);
  const double by_key = scanned({keys.data(), kQueries, kDim}, all, centroids, labels, pool);
  EXPECT_GT(by_query, 2 * by_key) << by_query << " against " << by_key;
}

// Queries and keys are meant as after RoPE: what comes before it is turned back.
TEST(OodVectors, AreTurnedBackForThoseWhoReadBeforeRope) {
  ModelConfig config;
  config.head_dim = kDim;
  config.query_heads = 2;
  config.kv_heads = 1;
  const Rope rope(config, 1000);
  VectorMaker maker({2, 1, kDim}, KvKind::ood, 1.0, rope, 5);
  maker.make(900, 3);
  std::vector<float> again = maker.k_unrotated;
  for (int t = 0; t < 3; ++t)
    rope.rotate(std::span(again).subspan(static_cast<std::size_t>(t * kDim), kDim),
                static_cast<Position>(900 + t));
  for (std::size_t i = 0; i < again.size(); ++i) EXPECT_NEAR(again[i], maker.k[i], 1e-4f);
}

}  // namespace
}  // namespace lode
