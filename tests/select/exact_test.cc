// SPDX-License-Identifier: Apache-2.0
// The oracle takes exactly the best keys, and random draws are uniform.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/selectors.h"

namespace lode::test {
namespace {

/// Softmax weight of each far key, in double; times |v| on demand.
std::vector<double> weights_of(World& world, const QueryBlock& block, const LayerGeometry& geometry,
                               int query_head, bool by_value) {
  const int kv_head = query_head / geometry.group();
  std::vector<double> w;
  double sum = 0;
  for (Position p = block.far_begin; p < block.far_end(0, geometry.dense); ++p) {
    const std::vector<float> k = world.key(p, kv_head);
    double s = 0;
    for (int i = 0; i < geometry.head_dim; ++i)
      s += static_cast<double>(block.q[static_cast<std::size_t>(query_head * geometry.head_dim + i)]) *
           k[static_cast<std::size_t>(i)];
    w.push_back(std::exp(s * geometry.scale));
    sum += w.back();
  }
  for (std::size_t i = 0; i < w.size(); ++i) {
    double norm = 0;
    for (const float x : world.value(block.far_begin + static_cast<Position>(i), kv_head))
      norm += static_cast<double>(x) * x;
    w[i] *= (by_value ? std::sqrt(norm) : 1.0) / sum;
  }
  return w;
}

class TopKTypes : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Select, TopKTypes, testing::Values(DType::f32, DType::f16, DType::q8, DType::q4),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(TopKTypes, TakesTheHeaviestKeys) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 3, .type = GetParam(), .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  const QueryBlock block = world.block(199, 1);
  for (const bool by_value : {false, true}) {
    for (const bool per_kv_head : {false, true}) {
      for (const bool by_mass : {false, true}) {
        const std::string spec = std::string(by_mass ? "topk:mass=0.7" : "topk:k=9") +
                                 (by_value ? ",by=value" : "") + (per_kv_head ? ",per=kv-head" : "");
        const auto selector = make(spec, geometry);
        Selection out;
        selector->append(0, block.kv, block.far_end(0, geometry.dense));
        selector->select({&block, 1}, out);
        const std::vector<FarSet> far = far_sets(out, block, geometry);
        for (int h = 0; h < geometry.query_heads; ++h) {
          std::vector<double> w = weights_of(world, block, geometry, h, by_value);
          if (per_kv_head) {
            w.assign(w.size(), 0.0);
            for (int g = 0; g < 3; ++g) {
              const std::vector<double> one = weights_of(world, block, geometry, h / 3 * 3 + g, by_value);
              for (std::size_t i = 0; i < w.size(); ++i) w[i] += one[i];
            }
          }
          double taken = 0, total = 0, lightest = 1e300, heaviest_left = 0;
          for (std::size_t i = 0; i < w.size(); ++i) {
            total += w[i];
            if (far[static_cast<std::size_t>(h)].contains(
                    {block.far_begin + static_cast<Position>(i), 0.0f})) {
              taken += w[i];
              lightest = std::min(lightest, w[i]);
            } else {
              heaviest_left = std::max(heaviest_left, w[i]);
            }
          }
          EXPECT_GE(lightest, heaviest_left * (1 - 1e-5)) << spec;
          if (by_mass) {
            EXPECT_GE(taken, 0.7 * total * (1 - 1e-5)) << spec;
            EXPECT_LT(taken - lightest, 0.7 * total * (1 + 1e-5)) << spec;
          } else {
            EXPECT_EQ(far[static_cast<std::size_t>(h)].size(), 9u) << spec;
          }
        }
        const SelectWork work = selector->take_work();
        EXPECT_EQ(work.keys_scored, 2 * 183);
        EXPECT_EQ(work.bytes, 2 * 183 * (block.kv.heads[0].token_bytes() / 2 + (by_value ? 4 : 0)));
        EXPECT_EQ(selector->take_work().bytes, 0);
      }
    }
  }
}

// A group with keys whose scores are infinite for some of its heads takes these keys, and next to them those
// that are best by the weights among finite scores: scores that are no weights say nothing to other heads.
TEST(TopK, InfiniteKeysComeFirstAndSpoilNoOtherKeysRank) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 3, .dense = {1, 16}});
  constexpr double kInf = std::numeric_limits<double>::infinity();
  world.shape_key = [](Position p, int, int i, float x) {
    return i == 3 && (p == 40 || p == 71) ? std::numeric_limits<float>::infinity() : x;
  };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  const QueryBlock block = world.block(199, 1);
  const Position far_end = block.far_end(0, geometry.dense);
  std::vector<double> weights(static_cast<std::size_t>(far_end), 0.0);
  for (int g = 0; g < 3; ++g) {
    std::vector<double> scores(weights.size(), -kInf);
    double sum = 0;
    for (Position p = 1; p < far_end; ++p) {
      const std::vector<float> k = world.key(p, 0);
      double s = 0;
      for (std::size_t i = 0; i < 64; ++i)
        s += static_cast<double>(block.q[static_cast<std::size_t>(g) * 64 + i]) * k[i];
      if (!std::isnan(s)) scores[static_cast<std::size_t>(p)] = s * geometry.scale;
      if (std::isfinite(s)) sum += std::exp(s * geometry.scale);
    }
    for (std::size_t p = 0; p < weights.size(); ++p) weights[p] += std::exp(scores[p]) / sum;
  }
  FarSet infinite, best;
  for (std::size_t p = 0; p < weights.size(); ++p)
    if (std::isinf(weights[p])) infinite.insert({static_cast<Position>(p), 0.0f});
  ASSERT_FALSE(infinite.empty());
  for (int i = 0; i < 9; ++i) {
    const auto p = std::max_element(weights.begin(), weights.end());
    best.insert({static_cast<Position>(p - weights.begin()), 0.0f});
    *p = 0;
  }
  EXPECT_EQ(select(*make("topk:k=9,per=kv-head", geometry), block, geometry)[0], best);
  EXPECT_EQ(select(*make("topk:mass=0.7,per=kv-head", geometry), block, geometry)[0], infinite);
}

TEST(TopK, TiesGoToTheNewerKey) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .dense = {1, 16}});
  world.shape_key = [](Position, int, int, float) { return 0.0f; };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(50);
  const QueryBlock block = world.block(49, 1);
  for (const char* spec : {"topk:k=4", "topk:mass=0.115"}) {  // 4 of 33 keys weigh 0.121
    Selection out;
    const auto selector = make(spec, geometry);
    selector->select({&block, 1}, out);
    EXPECT_EQ(far_sets(out, block, geometry)[0], (FarSet{{30, 0.0f}, {31, 0.0f}, {32, 0.0f}, {33, 0.0f}}))
        << spec;
  }
}

TEST(Random, DrawsAreUniformWithoutReplacement) {
  ThreadPool pool(2);
  World world({.kv_heads = 4, .group = 2, .dense = {1, 1}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(1000);
  const auto selector = make("random:fraction=20", geometry);
  std::vector<int> times(50, 0);
  for (Position p = 50; p < 1000; p += 1) {
    // The far part of position 50 is [1, 50); later ones are drawn from more keys and only their size is
    // looked at.
    const QueryBlock block = world.block(p, 1);
    Selection out;
    selector->select({&block, 1}, out);
    for (std::int64_t i = 0; i < out.sets(); ++i) EXPECT_EQ(out.keys(i), 20);
    EXPECT_TRUE(selector->take_work().bytes == 0);
  }
  LayerGeometry other = geometry;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    other.seed = seed;
    const QueryBlock block = world.block(50, 1);
    Selection out;
    make("random:fraction=20", other)->select({&block, 1}, out);
    const std::vector<FarSet> far = far_sets(out, block, other);
    for (std::size_t head = 0; head < 8; head += 2) {
      for (const auto& [row, weight] : far[head]) ++times[static_cast<std::size_t>(row)];
    }
  }
  // 2000 draws of 20 out of the 49 keys [1, 50): each key about 816 times, with a deviation of 22.
  EXPECT_EQ(times[0], 0);
  for (std::size_t row = 1; row < 50; ++row) EXPECT_NEAR(times[row], 816.3, 6 * 22) << row;
}

}  // namespace
}  // namespace lode::test
