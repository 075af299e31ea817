// SPDX-License-Identifier: Apache-2.0
// Spherical k-means: finds planted clusters, never gets worse by iterating, and is the same for any number of
// threads.
#include "ann/kmeans.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "base/cancel.h"
#include "base/threads.h"
#include "lodestone/error.h"
#include "support/normals.h"

namespace lode {
namespace {

using test::normals;

Matrix<const float> matrix(const std::vector<float>& x, std::int64_t d) {
  return {x.data(), std::ssize(x) / d, d};
}

double product(const float* a, const float* b, std::int64_t d) {
  double sum = 0;
  for (std::int64_t i = 0; i < d; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

/// sum_i max_c x_i . c, in double.
double objective(const std::vector<float>& x, const std::vector<float>& centroids, std::int64_t d) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(d)) {
    double best = -std::numeric_limits<double>::infinity();
    for (std::size_t c = 0; c < centroids.size(); c += static_cast<std::size_t>(d)) {
      best = std::max(best, product(&x[i], &centroids[c], d));
    }
    sum += best;
  }
  return sum;
}

TEST(KMeans, AssignsToTheLargestProductLowestIndexFirst) {
  ThreadPool pool(2);
  for (const std::int64_t d : {2, 64, 80, 128}) {
    const std::vector<float> x = normals(777 * d, 1);
    std::vector<float> centroids = normals(33 * d, 2);
    std::copy_n(centroids.begin(), d, centroids.begin() + 20 * d);  // 20 equals 0
    std::vector<std::int32_t> labels(777);
    assign_points(matrix(x, d), centroids, labels, pool);
    for (std::int64_t i = 0; i < 777; ++i) {
      double best = -1e30;
      for (std::int64_t c = 0; c < 33; ++c)
        best = std::max(best, product(&x[static_cast<std::size_t>(i * d)],
                                      &centroids[static_cast<std::size_t>(c * d)], d));
      const std::int32_t label = labels[static_cast<std::size_t>(i)];
      EXPECT_NEAR(
          product(&x[static_cast<std::size_t>(i * d)], &centroids[static_cast<std::size_t>(label * d)], d),
          best, 1e-4);
      EXPECT_NE(label, 20);
    }
  }
}

TEST(KMeans, FindsPlantedClusters) {
  ThreadPool pool(2);
  const std::int64_t d = 64, planted = 12, each = 100;
  const std::vector<float> centres = normals(planted * d, 3);
  std::vector<float> x = normals(planted * each * d, 4);
  for (std::int64_t i = 0; i < planted * each; ++i) {
    for (std::int64_t j = 0; j < d; ++j) {
      float& value = x[static_cast<std::size_t>(i * d + j)];
      value = value * 0.2f + centres[static_cast<std::size_t>(i % planted * d + j)];
    }
  }
  // More centroids than clusters, so that a start that misses a cluster does not decide.
  const std::vector<float> centroids = spherical_kmeans(matrix(x, d), {.clusters = 40, .seed = 1}, pool);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(planted * each));
  assign_points(matrix(x, d), centroids, labels, pool);
  std::vector<std::set<std::int64_t>> owners(40);
  for (std::int64_t i = 0; i < planted * each; ++i)
    owners[static_cast<std::size_t>(labels[static_cast<std::size_t>(i)])].insert(i % planted);
  for (const auto& owner : owners) EXPECT_LE(owner.size(), 1u);
}

TEST(KMeans, IterationsDoNotLoseAndCentroidsAreUnit) {
  ThreadPool pool(2);
  const std::int64_t d = 80;
  const std::vector<float> x = normals(600 * d, 5);
  double last = -std::numeric_limits<double>::infinity();
  for (const int iterations : {0, 1, 2, 5, 10, 30}) {
    const std::vector<float> centroids =
        spherical_kmeans(matrix(x, d), {.clusters = 20, .iterations = iterations, .seed = 9}, pool);
    for (std::int64_t c = 0; c < 20; ++c) {
      EXPECT_NEAR(product(&centroids[static_cast<std::size_t>(c * d)],
                          &centroids[static_cast<std::size_t>(c * d)], d),
                  1.0, 1e-5);
    }
    const double now = objective(x, centroids, d);
    EXPECT_GE(now, last * (1 - 1e-6)) << iterations;
    last = now;
  }
}

TEST(KMeans, SameForAnyThreadsAndDifferentForOtherSeeds) {
  const std::vector<float> x = normals(1000 * 64, 6);
  std::vector<std::vector<float>> found;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    found.push_back(spherical_kmeans(matrix(x, 64), {.clusters = 37, .seed = 2}, pool));
  }
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0], found[2]);
  ThreadPool pool(2);
  EXPECT_NE(found[0], spherical_kmeans(matrix(x, 64), {.clusters = 37, .seed = 3}, pool));
}

TEST(KMeans, AwkwardPoints) {
  ThreadPool pool(2);
  std::vector<float> equal(50 * 64, 0.25f), zero(50 * 64, 0.0f), huge = normals(50 * 64, 7),
                                                                 own = normals(50 * 64, 8);
  for (float& value : huge) value *= 1e38f / 8;
  for (const auto* x : {&equal, &zero, &huge, &own}) {
    for (const std::int64_t clusters : {1, 7, 50}) {
      const std::vector<float> centroids =
          spherical_kmeans(matrix(*x, 64), {.clusters = clusters, .seed = 1}, pool);
      EXPECT_EQ(std::ssize(centroids), clusters * 64);
      for (const float value : centroids) EXPECT_TRUE(std::isfinite(value));
    }
  }
  // With a centroid for each point, each has its own.
  const std::vector<float> centroids = spherical_kmeans(matrix(own, 64), {.clusters = 50, .seed = 1}, pool);
  std::vector<std::int32_t> labels(50);
  assign_points(matrix(own, 64), centroids, labels, pool);
  EXPECT_EQ(std::set<std::int32_t>(labels.begin(), labels.end()).size(), 50u);
}

TEST(KMeans, EmptyClustersAreRefilled) {
  ThreadPool pool(2);
  // Ninety-nine equal points and a hundred others: a random start draws equal ones again and again.
  std::vector<float> x = normals(199 * 64, 9);
  for (std::int64_t i = 0; i < 99; ++i) std::copy_n(x.begin(), 64, x.begin() + i * 64);
  const std::vector<float> centroids =
      spherical_kmeans(matrix(x, 64), {.clusters = 60, .iterations = 20, .seed = 1}, pool);
  std::vector<std::int32_t> labels(199);
  assign_points(matrix(x, 64), centroids, labels, pool);
  EXPECT_GE(std::set<std::int32_t>(labels.begin(), labels.end()).size(), 55u);
}

TEST(KMeans, StopsWhenAsked) {
  ThreadPool pool(2);
  const std::vector<float> x = normals(1000 * 64, 6);
  set_cancel(true);
  EXPECT_THROW(spherical_kmeans(matrix(x, 64), {.clusters = 10, .seed = 2}, pool), Interrupted);
  set_cancel(false);
}

}  // namespace
}  // namespace lode
