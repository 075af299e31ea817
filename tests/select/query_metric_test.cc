// SPDX-License-Identifier: Apache-2.0
// The metric of a context's queries against sums in double, a sample that does not see how a context came,
// and clusters that keep apart what queries tell apart, where the cosine mixes it.
#include "select/shared/query_metric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "select/squeezed/cluster_tree.h"
#include "support/world.h"

namespace lode::test {
namespace {

KvWrite write_of(const QueryBlock& block, Position begin, std::int64_t tokens, std::int64_t width) {
  return {.sequence = 0,
          .phase = Phase::context,
          .begin = begin,
          .tokens = tokens,
          .q_unrotated = block.q_unrotated.subspan(static_cast<std::size_t>(begin * width),
                                                   static_cast<std::size_t>(tokens * width)),
          .k_unrotated = {},
          .q = {},
          .k = {},
          .v = {}};
}

QuerySample sample_of(const QueryBlock& block, std::int64_t chunk, std::int64_t width) {
  QuerySample sample;
  for (std::int64_t begin = 0; begin < block.tokens; begin += chunk)
    sample.take(write_of(block, static_cast<Position>(begin), std::min(chunk, block.tokens - begin), width));
  return sample;
}

/// The same of the queries alone that it wants.
QuerySample sample_of_wanted(const QueryBlock& block, std::int64_t chunk, std::int64_t width) {
  QuerySample sample;
  for (std::int64_t begin = 0; begin < block.tokens; begin += chunk) {
    const std::int64_t tokens = std::min(chunk, block.tokens - begin);
    const std::vector<Position> positions = sample.wanted(static_cast<Position>(begin), tokens);
    std::vector<float> q;
    for (const Position p : positions)
      q.insert(q.end(), block.q_unrotated.begin() + p * width, block.q_unrotated.begin() + (p + 1) * width);
    sample.take_wanted(
        {.begin = static_cast<Position>(begin), .tokens = tokens, .positions = positions, .q = q});
  }
  return sample;
}

TEST(QuerySample, DependsOnPositionsAlone) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(3000);
  const QueryBlock block = world.block(0, 3000);
  const QuerySample whole = sample_of(block, 3000, 32);
  EXPECT_GT(whole.tokens(), QuerySample::kMost / 2);
  EXPECT_LE(whole.tokens(), QuerySample::kMost);
  for (const std::int64_t chunk : {1, 7, 512, 2999}) {
    for (const QuerySample& other : {sample_of(block, chunk, 32), sample_of_wanted(block, chunk, 32)}) {
      ASSERT_EQ(other.tokens(), whole.tokens()) << chunk;
      for (std::int64_t i = 0; i < whole.tokens(); ++i)
        ASSERT_TRUE(std::equal(whole.token(i).begin(), whole.token(i).end(), other.token(i).begin()))
            << chunk;
    }
  }
  // Behind a file of 700 tokens, whose queries nobody has: thinning drops the first of the sample.
  QuerySample behind[2];
  behind[0].take(write_of(block, 701, 2299, 32));
  for (Position at = 701; at < 3000; ++at) behind[1].take(write_of(block, at, 1, 32));
  ASSERT_EQ(behind[1].tokens(), behind[0].tokens());
  for (std::int64_t i = 0; i < behind[0].tokens(); ++i)
    ASSERT_TRUE(std::equal(behind[0].token(i).begin(), behind[0].token(i).end(), behind[1].token(i).begin()));
  QuerySample cut = whole;
  cut.roll_back(1000);
  EXPECT_EQ(cut.tokens(), (whole.tokens() * 1000 + 2999) / 3000);
  cut.roll_back(0);
  EXPECT_EQ(cut.tokens(), 0);
}

TEST(QuerySample, IsTakenBackInPieces) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(3000);
  const QueryBlock block = world.block(0, 3000);
  QuerySample here, elsewhere;
  for (const auto& [begin, end] :
       {std::pair<Position, Position>{0, 100}, {100, 900}, {900, 2999}, {2999, 3000}}) {
    here.take(write_of(block, begin, end - begin, 32));
    ASSERT_TRUE(elsewhere.take_back(here.kept(begin, end)));
    ASSERT_EQ(elsewhere.tokens(), here.tokens());
    for (std::int64_t i = 0; i < here.tokens(); ++i)
      ASSERT_TRUE(std::equal(here.token(i).begin(), here.token(i).end(), elsewhere.token(i).begin()));
    EXPECT_EQ(elsewhere.wanted(end, 1000), here.wanted(end, 1000));
  }
}

/// Of a chunk that was ended in its midst only some layers have heard, and thinned what was kept before it.
TEST(QuerySample, IsTheSameBehindAChunkThatWasEnded) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(3000);
  const QueryBlock block = world.block(0, 3000);
  for (const std::int64_t size : {700, 1100, 3000})
    for (const bool rolled_back : {false, true}) {
      QuerySample undisturbed, ended, on;
      undisturbed.take(write_of(block, 0, size, 32));
      ended.take(write_of(block, 0, 512, 32));
      ended.take(write_of(block, 512, std::min<std::int64_t>(size - 512, 512), 32));
      if (rolled_back) ended.roll_back(512);
      ASSERT_TRUE(on.take_back(ended.kept(0, 512)));
      on.take(write_of(block, 512, size - 512, 32));
      ASSERT_EQ(on.tokens(), undisturbed.tokens()) << size << rolled_back;
      for (std::int64_t i = 0; i < on.tokens(); ++i)
        ASSERT_TRUE(std::equal(on.token(i).begin(), on.token(i).end(), undisturbed.token(i).begin()));
    }
}

TEST(QuerySample, RefusesWhatDoesNotFit) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(2000);
  const QuerySample whole = sample_of(world.block(0, 2000), 2000, 32);
  const KeptQueries fits = whole.kept(0, 2000);
  const auto refuses = [&](const auto& change, const QuerySample& by = {}) {
    KeptQueries kept = fits;
    change(kept);
    QuerySample sample = by;
    EXPECT_FALSE(sample.take_back(kept));
    EXPECT_EQ(sample.tokens(), by.tokens());
  };
  refuses([](KeptQueries& kept) { kept.rows.pop_back(); });
  refuses([](KeptQueries& kept) { kept.positions.pop_back(); });
  refuses([](KeptQueries& kept) { ++kept.positions[3]; });
  refuses([](KeptQueries& kept) { kept.positions[0] = -4; });
  refuses([](KeptQueries& kept) { std::swap(kept.positions[3], kept.positions[4]); });
  refuses([](KeptQueries& kept) { kept.stride = 3; });
  refuses([](KeptQueries& kept) { kept = {.stride = std::int64_t{1} << 62, .positions = {}, .rows = {}}; });
  refuses([](KeptQueries&) {}, whole);  // it is known already
  QuerySample sample;
  EXPECT_TRUE(sample.take_back(fits));
}

// Who asks what is wanted has not cut the sample of a text that is now read from an earlier token on.
TEST(QuerySample, WantsOfATextThatIsReadAnewWhatItThenTakes) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(3000);
  const QueryBlock block = world.block(0, 3000);
  for (const std::int64_t begin : {0, 400, 2990}) {
    QuerySample anew = sample_of(block, 3000, 32), rolled_back = anew;
    rolled_back.roll_back(begin);
    const std::vector<Position> wanted = anew.wanted(static_cast<Position>(begin), 10);
    EXPECT_EQ(wanted, rolled_back.wanted(static_cast<Position>(begin), 10)) << begin;
    anew.take(write_of(block, begin, 10, 32));
    EXPECT_EQ(anew.tokens(), rolled_back.tokens() + std::ssize(wanted)) << begin;
  }
}

// A text that was cut short is sampled as finely from there on as any of its length, and as the whole one
// once it is as long again.
TEST(QuerySample, GrowsFineAgainBehindACut) {
  World world({.kv_heads = 1, .group = 2, .d = 16});
  world.write(3000);
  const QueryBlock block = world.block(0, 3000);
  const QuerySample whole = sample_of(block, 3000, 32);  // every eighth
  QuerySample cut = whole;
  cut.roll_back(100);
  ASSERT_EQ(cut.tokens(), 13);
  cut.take(write_of(block, 100, 300, 32));
  EXPECT_EQ(cut.tokens(), 13 + 300);
  cut.take(write_of(block, 400, 2600, 32));
  ASSERT_EQ(cut.tokens(), whole.tokens());
  for (std::int64_t i = 0; i < whole.tokens(); ++i)
    ASSERT_TRUE(std::equal(whole.token(i).begin(), whole.token(i).end(), cut.token(i).begin()));
}

TEST(QueryMetric, IsTheMeanSquareOfWhatQueriesTellApart) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .group = 2, .d = 16});
  world.write(300);
  const LayerGeometry geometry = world.geometry(pool);
  const QueryBlock block = world.block(0, 300);
  const QuerySample sample = sample_of(block, 300, 64);
  const auto metric = query_metric(sample, geometry, 300);
  ASSERT_EQ(metric.size(), 2u);
  for (std::size_t head = 0; head < 2; ++head) {
    const std::vector<float> a = world.key(5, static_cast<int>(head)),
                             b = world.key(9, static_cast<int>(head));
    double apart = 0, along = 0, trace = 0, norm = 0;
    for (std::int64_t i = 0; i < 300; ++i) {
      std::vector<float> q(sample.token(i).begin(), sample.token(i).end());
      world.rope().rotate(q, static_cast<Position>(300 + i * 256 / 300));
      for (std::size_t h = 2 * head; h < 2 * head + 2; ++h) {
        double s = 0;
        for (std::size_t j = 0; j < 16; ++j) {
          s += static_cast<double>(q[h * 16 + j]) * (a[j] - b[j]);
          trace += static_cast<double>(q[h * 16 + j]) * q[h * 16 + j];
        }
        along += s * s;
      }
    }
    for (std::size_t j = 0; j < 16; ++j) {
      double y = 0;
      for (std::size_t i = 0; i < 16; ++i) y += static_cast<double>(a[i] - b[i]) * metric[head][i * 16 + j];
      apart += y * y;
      norm += static_cast<double>(a[j] - b[j]) * (a[j] - b[j]);
    }
    const double scale = static_cast<double>(geometry.scale) * geometry.scale / 600.0;
    EXPECT_NEAR(apart, (along + 0.1 * trace / 16 * norm) * scale, 1e-4 * apart);
  }
}

// Half of the queries look for one key, half for none: the metric is that of the first, nearly.
TEST(QueryMetric, SharpQueriesWeighMore) {
  ThreadPool pool(2), one(1);
  World world({.kv_heads = 1, .group = 1, .d = 16});
  world.shape_key = [](Position p, int, int i, float x) { return i == 7 && p == 40 ? 60.0f : 0.1f * x; };
  world.write(200);
  const LayerGeometry geometry = world.geometry(pool);
  QueryBlock block = world.block(0, 200);
  std::vector<float> queries(200 * 16);
  for (std::size_t i = 0; i < 200; ++i) queries[i * 16 + (i % 2 == 0 ? 7 : 6)] = 3.0f;
  block.q_unrotated = queries;
  const QuerySample sample = sample_of(block, 200, 16);
  const KeyRange keys = {.kv = world.store().layer(0), .begin = 0, .end = 200};
  const std::vector<float> plain = query_metric(sample, geometry, 200)[0],
                           sharp = query_metric(sample, geometry, 200, keys)[0];
  // Mean square of the queries in the plane of dimensions i and i + 8, which RoPE turns.
  const auto plane = [](const std::vector<float>& l, std::size_t i) {
    double sum = 0;
    for (const std::size_t row : {i, i + 8}) {
      for (std::size_t j = 0; j < 16; ++j) sum += static_cast<double>(l[row * 16 + j]) * l[row * 16 + j];
    }
    return sum;
  };
  EXPECT_NEAR(plane(plain, 7), plane(plain, 6), 0.01 * plane(plain, 6));
  EXPECT_GT(plane(sharp, 7), 3.0 * plane(sharp, 6));
  EXPECT_EQ(query_metric(sample, world.geometry(one), 200, keys)[0], sharp);
}

TEST(QueryMetric, HeadsWithoutQueriesHaveTheIdentity) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 16});
  world.write(2);
  QueryBlock block = world.block(0, 2);
  const std::vector<float> bad(32, std::numeric_limits<float>::quiet_NaN());
  QuerySample broken;
  block.q_unrotated = bad;
  broken.take(write_of(block, 0, 2, 16));
  for (const QuerySample& sample : {QuerySample{}, broken}) {
    const auto metric = query_metric(sample, world.geometry(pool), 2);
    for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(metric[0][i], i % 17 == 0 ? 1.0f : 0.0f);
  }
}

// All keys have much in common and differ at random in many directions; queries look at one more alone, in
// which a few keys stand out.
TEST(QueryMetric, KeysThatQueriesTellApartAreApart) {
  ThreadPool pool(2);
  const auto rare = [](Position p) { return p % 97 == 5; };
  World world({.kv_heads = 1, .group = 1, .d = 64});
  world.shape_key = [&](Position p, int, int i, float x) {
    return i == 31 ? 8.0f : i == 30 ? (rare(p) ? 3.0f : 0.0f) : x;  // pairs that RoPE hardly turns
  };
  world.write(1000);
  const KvRows keys = world.store().layer(0).heads[0];
  std::vector<float> metric(64 * 64);
  for (std::size_t i = 0; i < 64; ++i) metric[i * 65] = i == 30 ? 4.0f : 0.3f;
  const auto mixed = [&](std::span<const float> l) {
    const ClusterTree tree = build_cluster_tree(keys, 0, 1000, {.nodes = {50}, .seed = 1, .metric = l}, pool);
    int count = 0;
    for (std::int32_t node = 0; node < tree.levels[0].nodes(); ++node) {
      int others = 0, wanted = 0;
      for (std::int32_t i = tree.levels[0].first[static_cast<std::size_t>(node)];
           i < tree.levels[0].first[static_cast<std::size_t>(node) + 1]; ++i)
        ++(rare(tree.rows[static_cast<std::size_t>(i)]) ? wanted : others);
      count += wanted > 0 && others > 0 ? wanted : 0;
    }
    return count;
  };
  EXPECT_EQ(mixed(metric), 0);
  EXPECT_GE(mixed({}), 5);
}

}  // namespace
}  // namespace lode::test
