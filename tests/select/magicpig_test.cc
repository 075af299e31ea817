// SPDX-License-Identifier: Apache-2.0
// MagicPIG against its definition in float64: who is sampled, with which weight, and that the weights are
// those of the sampling's own probabilities.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "support/damaged_index.h"
#include "support/forged_index.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

double sampled_probability(double theta, int k, int l) {
  const double p = std::pow(1 - theta / std::numbers::pi, k);
  // The binomial tail from its largest terms down: no difference of nearly equal numbers.
  double u = 0, term = l * (l - 1) / 2.0 * p * p * std::pow(1 - p, l - 2);
  for (int i = 2; i <= l && term > 0; ++i) {
    u += term;
    term *= (l - i) / (i + 1.0) * p / (1 - p);
  }
  return p >= 1 ? 1 : u;
}

double angle(const std::vector<double>& x, const std::vector<double>& y) {
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xy += x[i] * y[i];
    xx += x[i] * x[i];
    yy += y[i] * y[i];
  }
  return std::acos(std::clamp(xy / std::sqrt(xx * yy), -1.0, 1.0));
}

/// The definition: every key of [first, far_end) hashed and counted.
FarSet sampled_plainly(const World& world, const LayerGeometry& geometry, const float* query, int kv_head,
                       std::int64_t context, Position far_end, int k, int l) {
  const auto d = static_cast<std::size_t>(geometry.head_dim);
  const auto first = static_cast<Position>(geometry.dense.sink);
  std::vector<double> mean(d, 0.0);
  for (Position p = first; p < context; ++p) {
    for (std::size_t i = 0; i < d; ++i)
      mean[i] += world.key(p, kv_head)[i] / static_cast<double>(context - first);
  }
  Rng rng(hash_seed(geometry.seed, geometry.layer, kv_head));
  std::vector<float> directions(static_cast<std::size_t>(k * l) * d);
  for (float& x : directions) x = static_cast<float>(rng.normal());
  const auto codes = [&](const std::vector<double>& x) {
    std::vector<int> out(static_cast<std::size_t>(l), 0);
    for (int f = 0; f < k * l; ++f) {
      double dot = 0;
      for (std::size_t i = 0; i < d; ++i) dot += x[i] * directions[static_cast<std::size_t>(f) * d + i];
      out[static_cast<std::size_t>(f / k)] |= (dot > 0 ? 1 : 0) << f % k;
    }
    return out;
  };
  const std::vector<double> q(query, query + d);
  const std::vector<int> of_query = codes(q);
  FarSet sampled;
  for (Position p = first; p < far_end; ++p) {
    const std::vector<float> key = world.key(p, kv_head);
    std::vector<double> centred(d);
    for (std::size_t i = 0; i < d; ++i) centred[i] = key[i] - mean[i];
    const std::vector<int> own = codes(centred);
    int met = 0;
    for (std::size_t t = 0; t < own.size(); ++t) met += own[t] == of_query[t];
    if (met >= 2)
      sampled.emplace(p, static_cast<float>(-std::log(sampled_probability(angle(q, centred), k, l))));
  }
  return sampled;
}

void expect_near(const FarSet& found, const FarSet& expected) {
  ASSERT_EQ(found.size(), expected.size());
  auto e = expected.begin();
  for (const auto& [row, weight] : found) {
    EXPECT_EQ(row, e->first);
    EXPECT_NEAR(weight, e->second, 1e-4 * (1 + std::abs(e->second)));
    ++e;
  }
}

TEST(MagicPig, SamplesAndWeighsAsDefined) {
  ThreadPool pool(2);
  for (const auto& [k, l] : {std::pair{3, 12}, {1, 2}, {8, 40}}) {
    World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {3, 16}});
    // A common part, which centring takes away.
    world.shape_key = [](Position, int, int i, float x) { return x + (i < 4 ? 2.0f : 0.0f); };
    const LayerGeometry geometry = world.geometry(pool);
    world.write(130);
    const auto selector = make("magicpig:K=" + std::to_string(k) + ",L=" + std::to_string(l), geometry);
    selector->build(0, world.store().layer(0));
    world.write(30);
    const QueryBlock block = world.block(157, 3);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 3; ++t) {
      for (int h = 0; h < 4; ++h) {
        const auto at = static_cast<std::size_t>(t * 4 + h);
        expect_near(found[at], sampled_plainly(world, geometry, block.q.data() + at * 32, h / 2, 130,
                                               block.far_end(t, geometry.dense), k, l));
      }
    }
  }
}

// Over many draws of the directions a key is sampled as often as the weight says.
TEST(MagicPig, WeightsAreTheInverseOfHowOftenKeysAreSampled) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 1, .d = 16, .dense = {0, 4}});
  world.write(40);
  const QueryBlock block = world.block(39, 1);
  constexpr int kDraws = 3000;
  std::vector<int> times(36, 0);
  std::vector<double> probability(36, 0.0);
  for (int draw = 0; draw < kDraws; ++draw) {
    LayerGeometry geometry = world.geometry(pool);
    geometry.seed = static_cast<std::uint64_t>(draw);
    const auto selector = make("magicpig:K=2,L=5", geometry);
    selector->build(0, world.store().layer(0));
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (const auto& [row, weight] : found[0]) {
      ++times[static_cast<std::size_t>(row)];
      probability[static_cast<std::size_t>(row)] = std::exp(-static_cast<double>(weight));
    }
  }
  for (std::size_t row = 0; row < times.size(); ++row) {
    const double u = probability[row];
    EXPECT_NEAR(times[row] / static_cast<double>(kDraws), u, 4.5 * std::sqrt(u * (1 - u) / kDraws)) << row;
  }
}

// What rounding can do to an angle never makes a weight that is not a number: keys along, against and across
// the query, and keys of no length.
TEST(MagicPig, WeightsAreFiniteAtEveryAngle) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 16, .dense = {0, 1}});
  world.shape_key = [](Position p, int, int i, float) {
    const float along = i == 0 ? 1.0f : 0.0f;
    return p % 4 == 0 ? along : p % 4 == 1 ? -along : p % 4 == 2 ? (i == 1 ? 1e-30f : 0.0f) : 0.0f;
  };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(65);
  for (const char* spec : {"magicpig:K=1,L=2", "magicpig:K=1,L=4096", "magicpig:K=16,L=2", "magicpig"}) {
    const auto selector = make(spec, geometry);
    selector->build(0, world.store().layer(0));
    for (Position p = 40; p < 65; ++p) {
      const std::vector<FarSet> found = select(*selector, world.block(p, 1), geometry);
      for (const auto& [row, weight] : found[0]) {
        EXPECT_TRUE(std::isfinite(weight)) << spec;
        EXPECT_GE(weight, -1e-6f);
      }
    }
  }
}

// A key along the query is always sampled, with weight 1; with tables enough everything is, and the estimate
// is full attention.
TEST(MagicPig, ManyTablesSampleEverything) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 32, .dense = {1, 8}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(120);
  const auto selector = make("magicpig:K=1,L=200", geometry);
  selector->build(0, world.store().layer(0));
  for (const FarSet& set : select(*selector, world.block(119, 1), geometry)) {
    EXPECT_EQ(set.size(), 111u);
    for (const auto& [row, weight] : set) EXPECT_NEAR(weight, 0.0f, 1e-5f);
  }
}

TEST(MagicPig, CountsWhatItReads) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 1, .d = 32, .dense = {1, 8}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(2000);
  const auto selector = make("magicpig:K=6,L=20", geometry);
  selector->build(0, world.store().layer(0));
  SelectWork work;
  const auto found = select(*selector, world.block(1999, 1), geometry, &work);
  EXPECT_EQ(work.keys_scored, std::ssize(found[0]));
  const std::int64_t directions = 6 * 20 * 32 * 4;
  EXPECT_GE(work.bytes, directions + std::ssize(found[0]) * (2 * 4 + 32 * 4 + 4));
  EXPECT_LT(work.bytes, directions + std::ssize(found[0]) * (32 * 4 + 4) + 20 * 2000 * 4 / 4);
  EXPECT_GE(selector->index_bytes(), 2000 * 20 * (2 + 4));
}

TEST(MagicPig, DamagedIndexesAreRefused) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 1, .d = 32, .dense = {1, 16}});
  LayerGeometry geometry = world.geometry(pool);
  world.write(100);
  const auto selector = make("magicpig:K=5,L=8", geometry);
  selector->build(0, world.store().layer(0));
  const IndexSections good = saved_sections(*selector);
  const KvLayer kv = world.store().layer(0);
  const DamagedIndex refused(*selector, good, kv);
  refused("KV heads", "shape", 0, number(3));
  refused("K and L", "shape", 8, number(6));
  refused("K and L", "shape", 16, number(-8));
  refused("behind the sink", "shape", 32, number(2));
  refused("within the context", "shape", 40, number(101));
  refused("within the context", "shape", 40, number(std::numeric_limits<std::int64_t>::min()));
  refused("sizes", "shape", 40, number(99));
  refused("same seed", "shape", 48, number(8));
  refused("finite", "means", 4, std::string("\x00\x00\xc0\x7f", 4));
  refused("K bits", "codes", 6, std::string("\x20\x00", 2));
  load_sections(*selector, good, kv);
  EXPECT_THROW(load_sections(*make("magicpig:K=5,L=9", geometry), good, kv), InputError);
  geometry.seed = 8;
  EXPECT_THROW(load_sections(*make("magicpig:K=5,L=8", geometry), good, kv), InputError);
}

TEST(MagicPig, KeysOutOfRangeAreRefused) {
  for (const char* spec : {"magicpig:K=0", "magicpig:K=17", "magicpig:L=1", "magicpig:L=5000"})
    expect_refused("magicpig", [&] { parse_spec(spec); });
}

}  // namespace
}  // namespace lode::test
