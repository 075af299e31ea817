// SPDX-License-Identifier: Apache-2.0
// PQCache: codes name the nearest centroids and choices follow from what the codes stand for, in float64;
// enough centroids make the choice exact; k-means lowers its error; budgets are exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ann/product_quantizer.h"
#include "select/baselines/product_codes.h"
#include "support/budgets.h"
#include "support/normals.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

double squared_distance(std::span<const float> a, const float* b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += (a[i] - static_cast<double>(b[i])) * (a[i] - static_cast<double>(b[i]));
  return sum;
}

TEST(ProductQuantizer, LabelsNameTheNearestCentroid) {
  for (const std::int64_t width : {1, 3, 32}) {
    const std::vector<float> x = normals(700 * width, 1), centroids = normals(37 * width, 2);
    std::vector<std::int32_t> labels(700);
    const Matrix<const float> points(x.data(), 700, width);
    nearest_centroids(points, centroids, labels);
    for (std::int64_t i = 0; i < 700; ++i) {
      double best = std::numeric_limits<double>::infinity();
      for (std::int64_t c = 0; c < 37; ++c)
        best = std::min(best, squared_distance(points[i], centroids.data() + c * width));
      EXPECT_LE(squared_distance(points[i], centroids.data() + labels[static_cast<std::size_t>(i)] * width),
                best + 1e-5);
    }
  }
}

TEST(ProductQuantizer, IterationsLowerTheErrorAndOddInputsServe) {
  const std::vector<float> x = normals(900 * 8, 3);
  const Matrix<const float> points(x.data(), 900, 8);
  double before = std::numeric_limits<double>::infinity();
  for (const int iterations : {1, 3, 20}) {
    const std::vector<float> centroids = euclidean_kmeans(points, 16, iterations, 5);
    std::vector<std::int32_t> labels(900);
    nearest_centroids(points, centroids, labels);
    double error = 0;
    for (std::int64_t i = 0; i < 900; ++i)
      error += squared_distance(points[i], centroids.data() + labels[static_cast<std::size_t>(i)] * 8);
    EXPECT_LT(error, before);
    before = error;
  }
  EXPECT_EQ(std::ssize(euclidean_kmeans({x.data(), 5, 8}, 16, 10, 1)), 5 * 8);  // more centroids than vectors
  const std::vector<float> same(64 * 4, 1e30f);                                 // whose squares are no floats
  for (const float c : euclidean_kmeans({same.data(), 64, 4}, 8, 10, 1)) EXPECT_EQ(c, 1e30f);
}

struct Shape {
  int m, bits;
  bool per_kv_head;
};

TEST(PqCache, AttendsTheBestOfWhatCodesStandFor) {
  ThreadPool pool(2);
  for (const Shape& rule : {Shape{2, 6, true}, Shape{4, 4, false}, Shape{8, 3, true}, Shape{1, 8, false}}) {
    World world({.kv_heads = 2, .group = 2, .d = 64, .type = DType::f16, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(260);
    const auto selector =
        make("pqcache:budget=11,m=" + std::to_string(rule.m) + ",bits=" + std::to_string(rule.bits) +
                 (rule.per_kv_head ? "" : ",per=query-head"),
             geometry);
    selector->build(0, world.store().layer(0));
    // The same codebooks, as the selector's file says it makes them.
    ProductCodes codes({.begin = 1, .heads = 2, .d = 64, .parts = rule.m, .bits = rule.bits});
    const auto in_turn = [](std::int64_t items, const std::function<void(std::int64_t, int)>& body) {
      for (std::int64_t i = 0; i < items; ++i) body(i, 0);
    };
    codes.train(
        world.store().layer(0), [&](int h) { return hash_seed(geometry.seed, geometry.layer, h); }, in_turn);
    world.write(30);
    const QueryBlock block = world.block(287, 3);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 3; ++t) {
      for (int h = 0; h < 4; ++h) {
        const Position end = block.far_end(t, geometry.dense);
        std::vector<double> sums(static_cast<std::size_t>(end - 1), 0.0);
        for (int g = 0; g < 2; ++g) {
          const int head = rule.per_kv_head ? h / 2 * 2 + g : h;
          std::vector<double> scores;
          double total = 0;
          for (Position p = 1; p < end; ++p) {
            const std::vector<float> key = world.key(p, h / 2);
            const ProductQuantizer& quantizer = codes.quantizer(h / 2);
            double score = 0;
            for (int part = 0; part < rule.m; ++part) {
              const auto width = static_cast<std::size_t>(quantizer.width);
              const std::span<const float> own =
                  std::span(key).subspan(static_cast<std::size_t>(part) * width, width);
              int best = 0;
              for (int c = 1; c < quantizer.levels; ++c) {
                if (squared_distance(own, quantizer.part(part) + c * quantizer.width) <
                    squared_distance(own, quantizer.part(part) + best * quantizer.width))
                  best = c;
              }
              for (std::size_t i = 0; i < width; ++i)
                score += static_cast<double>(block.q[static_cast<std::size_t>((t * 4 + head) * 64) +
                                                     static_cast<std::size_t>(part) * width + i]) *
                         quantizer.part(part)[best * quantizer.width + static_cast<int>(i)];
            }
            scores.push_back(score * geometry.scale);
            total += std::exp(scores.back());
          }
          for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += std::exp(scores[i]) / total;
        }
        const FarSet& own = found[static_cast<std::size_t>(t * 4 + h)];
        EXPECT_EQ(own.size(), 11u);
        std::vector<double> order = sums;
        std::sort(order.rbegin(), order.rend());
        for (const auto& [row, weight] : own)  // equal codes tie: none below the eleventh is taken
          EXPECT_GE(sums[static_cast<std::size_t>(row - 1)], order[10] * (1 - 1e-4));
      }
    }
  }
}

TEST(PqCache, BudgetsAreExactAndTiesGoToTheNewest) {
  expect_exact_budgets("pqcache", 1, {1, 2, 127, 128, 282, 283, 284, 100000});
}

TEST(PqCache, GrownEqualsRebuiltAndBytesAreCounted) {
  ThreadPool pool(2);
  for (const auto& [keys, code_bytes, levels] :
       {std::tuple{"m=2,bits=6", 2, 64}, {"m=16,bits=4", 8, 16}, {"m=3,bits=2", 2, 4}}) {
    World world({.kv_heads = 2, .group = 2, .d = 48, .type = DType::q8, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    const std::string spec = std::string("pqcache:budget=9,") + keys;
    const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
    world.write(500);
    for (Selector* selector : {grown.get(), rebuilt.get()}) selector->build(0, world.store().layer(0));
    grow_and_roll_back(world, *grown);
    const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 1), 1);
    SelectWork work;
    EXPECT_EQ(select(*grown, block, geometry), select(*rebuilt, block, geometry, &work));
    const std::int64_t far = world.tokens() - 1 - 16, codebook = levels * 48 * 4;
    EXPECT_EQ(work.bytes, 2 * (far * code_bytes + codebook));
    EXPECT_EQ(work.keys_scored, 2 * far);
    EXPECT_EQ(find_method("pqcache").index_bytes(parse_spec(spec), geometry, 1000),
              2 * (1000 * code_bytes + codebook));
  }
}

TEST(PqCache, SpecsOutOfRangeAreRefused) {
  for (const char* spec : {"pqcache:m=0", "pqcache:bits=9", "pqcache:bits=0", "pqcache:iterations=0",
                           "pqcache:budget=0", "pqcache:per=page"})
    expect_refused("pqcache", [&] { parse_spec(spec); });
  ThreadPool pool(1);
  World world({.d = 64});
  expect_refused("to divide the 64 channels", [&] { make("pqcache:m=3", world.geometry(pool)); });
}

}  // namespace
}  // namespace lode::test
