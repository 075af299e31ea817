// SPDX-License-Identifier: Apache-2.0
// Attention over query sets against attention in double, whatever the sets look like; and its bits, which
// depend on nothing but a token's own keys.
#include "attend/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "select/methods.h"
#include "support/rounding.h"
#include "support/world.h"

namespace lode::test {
namespace {

struct Result {
  std::vector<float> output;  // [T, Hq, d]
  AttendWork work;
};

Result run(const QueryBlock& block, const Selection& selection, const LayerGeometry& geometry,
           const MassSink& mass = {}) {
  Result result;
  result.output.assign(block.q.size(), std::nanf(""));  // every number must be written
  float* const output = result.output.data();
  result.work = attend({&block, 1}, selection, geometry, {&output, 1}, mass);
  return result;
}

Result run_full(const QueryBlock& block, const LayerGeometry& geometry, const MassSink& mass = {}) {
  Result result;
  result.output.assign(block.q.size(), std::nanf(""));
  float* const output = result.output.data();
  result.work = attend_full({&block, 1}, geometry, {&output, 1}, mass);
  return result;
}

void expect_exact(World& world, const QueryBlock& block, const Selection& selection,
                  const LayerGeometry& geometry, const std::vector<float>& output, double tolerance = 2e-5) {
  std::vector<std::string> problems;
  const std::vector<FarSet> far = far_sets(selection, block, geometry, &problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
  const int d = geometry.head_dim;
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    for (int h = 0; h < geometry.query_heads; ++h) {
      const std::int64_t query = t * geometry.query_heads + h;
      const std::vector<double> expected =
          attend_exactly(world, block, geometry, t, h, far[static_cast<std::size_t>(query)]);
      for (int i = 0; i < d; ++i) {
        ASSERT_NEAR(output[static_cast<std::size_t>(query * d + i)], expected[static_cast<std::size_t>(i)],
                    tolerance)
            << "token " << t << " head " << h << " element " << i;
      }
    }
  }
}

/// Splits a block's queries into random sets, each with random far keys of its last token.
Selection random_selection(const QueryBlock& block, const LayerGeometry& geometry, Rng& rng, bool weights) {
  Selection out;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    for (std::int64_t t = 0; t < block.tokens;) {
      const auto end = std::min(block.tokens, t + 1 + static_cast<std::int64_t>(rng.below(4)));
      std::uint32_t left = all_heads(geometry.group());
      while (left != 0) {
        std::uint32_t heads = static_cast<std::uint32_t>(rng.next()) & left;
        if (heads == 0) heads = left;
        left &= ~heads;
        out.add_set(
            {block.sequence, head, heads, static_cast<std::int32_t>(t), static_cast<std::int32_t>(end)});
        const Position far_end = block.far_end(end - 1, geometry.dense);
        const double density = rng.uniform();
        for (Position row = block.far_begin; row < far_end;) {
          const auto length = std::min<Position>(
              far_end - row, 1 + static_cast<Position>(rng.below(rng.below(4) == 0 ? 60 : 3)));
          if (rng.uniform() >= density) {
            row += length;
          } else if (rng.below(2) == 0) {
            out.add_run(row, row + length);
            row += length;
          } else {
            for (const Position stop = row + length; row < stop; ++row) {
              out.add_row(row, weights && rng.below(3) == 0 ? static_cast<float>(rng.normal()) : 0.0f);
            }
          }
        }
      }
      t = end;
    }
  }
  return out;
}

class Shapes : public testing::TestWithParam<std::tuple<int, int>> {};  // group, d
INSTANTIATE_TEST_SUITE_P(Attend, Shapes,
                         testing::Values(std::tuple(1, 64), std::tuple(2, 80), std::tuple(3, 96),
                                         std::tuple(4, 128), std::tuple(5, 64), std::tuple(7, 80),
                                         std::tuple(8, 256), std::tuple(16, 64), std::tuple(32, 64)));

TEST_P(Shapes, AnySetsGiveWhatTheirKeysSay) {
  ThreadPool pool(2);
  Rng rng(11);
  const auto [group, d] = GetParam();
  for (const LocalWindow dense :
       {LocalWindow{1, 8}, LocalWindow{0, 1}, LocalWindow{20, 3}, LocalWindow{4, 500}}) {
    World world({.kv_heads = 2, .group = group, .d = d, .dense = dense});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(150);
    for (const Position begin : {0, 5, 90, 141}) {
      const QueryBlock block = world.block(begin, std::min<std::int64_t>(9, 150 - begin));
      const Selection selection = random_selection(block, geometry, rng, begin % 2 == 1);
      expect_exact(world, block, selection, geometry, run(block, selection, geometry).output);
    }
  }
}

/// Sink and window of every query, as whoever shares the work attends them.
void attend_near(const QueryBlock& block, const LayerGeometry& geometry, AttentionState state) {
  const std::int64_t d = geometry.head_dim;
  std::vector<std::array<Run, 2>> runs(static_cast<std::size_t>(block.tokens));
  std::vector<AttendItem> items;
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    const Position position = block.begin + static_cast<Position>(t);
    const Position sink = std::min(block.far_begin, position + 1), far_end = block.far_end(t, geometry.dense);
    auto& own = runs[static_cast<std::size_t>(t)];
    own = {Run{0, sink}, Run{std::min(far_end, position + 1), position + 1}};
    for (int h = 0; h < geometry.query_heads; ++h) {
      const std::int64_t query = t * geometry.query_heads + h;
      items.push_back({.q = block.q.data() + query * d,
                       .queries = 1,
                       .kv = block.kv.heads[static_cast<std::size_t>(h / geometry.group())],
                       .runs = own,
                       .rows = {},
                       .log_weights = {},
                       .o = state.output + query * d,
                       .lse = state.lse + query});
    }
  }
  attend_items(items, geometry.scale, *geometry.pool);
}

TEST_P(Shapes, FarKeysAttendedApartAndMergedAreWhatTheirKeysSay) {
  ThreadPool pool(2);
  Rng rng(12);
  const auto [group, d] = GetParam();
  for (const LocalWindow dense :
       {LocalWindow{1, 8}, LocalWindow{0, 1}, LocalWindow{20, 3}, LocalWindow{4, 500}}) {
    World world({.kv_heads = 2, .group = group, .d = d, .dense = dense});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(150);
    for (const Position begin : {0, 5, 90, 141}) {
      const QueryBlock block = world.block(begin, std::min<std::int64_t>(9, 150 - begin));
      const Selection selection = random_selection(block, geometry, rng, begin % 2 == 1);
      const std::int64_t rows = block.tokens * geometry.query_heads;
      std::vector<float> near(block.q.size()), near_lse(static_cast<std::size_t>(rows));
      std::vector<float> far(near.size(), std::nanf("")), far_lse(near_lse.size(), std::nanf(""));
      const AttentionState near_state = {near.data(), near_lse.data(), rows, d};
      const AttentionState far_state = {far.data(), far_lse.data(), rows, d};
      attend_near(block, geometry, near_state);
      attend_far(block, selection, geometry, far_state);
      for (const float x : far_lse) ASSERT_FALSE(std::isnan(x));
      merge(near_state, far_state);
      expect_exact(world, block, selection, geometry, near);
    }
  }
}

TEST(Attend, FarKeysApartAreTheEmptySetWhereNothingWasChosenAndTakeTailsIn) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 8}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(40);
  const QueryBlock block = world.block(39, 1);
  std::vector<float> output(128, 7.0f), lse(2, 7.0f);
  Selection selection;
  selection.add_set({0, 0, 1u, 0, 1});
  selection.add_set({0, 0, 2u, 0, 1});
  attend_far(block, selection, geometry, {output.data(), lse.data(), 2, 64});
  for (const float x : lse) EXPECT_EQ(x, -INFINITY);
  for (const float x : output) EXPECT_EQ(x, 0.0f);
  const std::vector<float> tail(64, 3.0f), tail_lse(1, 1.5f);
  selection.set_tail(tail, tail_lse);  // of the second head
  attend_far(block, selection, geometry, {output.data(), lse.data(), 2, 64});
  EXPECT_EQ(lse[0], -INFINITY);
  EXPECT_FLOAT_EQ(lse[1], 1.5f);
  EXPECT_FLOAT_EQ(output[64], 3.0f);
  EXPECT_EQ(output[0], 0.0f);
}

TEST_P(Shapes, EverythingSelectedIsFullAttentionToTheBit) {
  ThreadPool pool(2);
  const auto [group, d] = GetParam();
  World world({.kv_heads = 2, .group = group, .d = d, .type = DType::f16});
  const LayerGeometry geometry = world.geometry(pool);
  const double tolerance = output_tolerance(DType::f16);
  world.write(700);
  for (const std::int64_t tokens : {1, 2, 7}) {
    const QueryBlock block = world.block(static_cast<Position>(700 - tokens), tokens);
    const Result full = run_full(block, geometry);
    Selection runs;
    make_full_selector(geometry)->select({&block, 1}, runs);
    EXPECT_EQ(run(block, runs, geometry).output, full.output) << tokens;
    Selection rows;  // the same keys, one by one and a set per query head
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < geometry.query_heads; ++h) {
        rows.add_set({0, h / group, 1u << (h % group), static_cast<std::int32_t>(t),
                      static_cast<std::int32_t>(t + 1)});
        for (Position p = block.far_begin; p < block.far_end(t, geometry.dense); ++p) rows.add_row(p);
      }
    }
    const Result all_rows = run(block, rows, geometry);
    EXPECT_EQ(all_rows.output, full.output) << tokens;
    EXPECT_EQ(all_rows.work.kv_bytes, full.work.kv_bytes);
    EXPECT_EQ(all_rows.work.far_keys, full.work.far_total);
    EXPECT_EQ(full.work.kv_bytes, full.work.full_bytes);
    expect_exact(world, block, runs, geometry, full.output, tolerance);
  }
}

TEST(Attend, BatchesAreRaggedAndGiveEachSequenceItsOwnBits) {
  ThreadPool pool(2);
  Rng rng(3);
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<QueryBlock> blocks;
  std::vector<Selection> alone;
  Selection together;
  std::vector<std::vector<float>> outputs, expected;
  const WorldShape shape = {.kv_heads = 2, .group = 4, .type = DType::bf16};
  const std::int64_t lengths[] = {1, 3, 17, 40, 600, 333}, tokens[] = {1, 3, 5, 1, 1, 6};
  for (int b = 0; b < 6; ++b) {
    worlds.push_back(std::make_unique<World>(shape, 50 + b, /*sequence=*/9 - b));
    worlds.back()->write(lengths[b]);
    blocks.push_back(worlds.back()->block(static_cast<Position>(lengths[b] - tokens[b]), tokens[b]));
    const LayerGeometry geometry = worlds[0]->geometry(pool);
    if (b == 5) {
      alone.emplace_back();
      make_full_selector(geometry)->select({&blocks.back(), 1}, alone.back());
    } else {
      alone.push_back(random_selection(blocks.back(), geometry, rng, true));
    }
    together.append(alone.back());
    expected.push_back(run(blocks.back(), alone.back(), geometry).output);
    outputs.emplace_back(blocks.back().q.size());
  }
  std::vector<float*> places;
  for (std::vector<float>& output : outputs) places.push_back(output.data());
  for (const int threads : {1, 2, 3}) {
    ThreadPool other(threads);
    attend(blocks, together, worlds[0]->geometry(other), places);
    for (int b = 0; b < 6; ++b)
      EXPECT_EQ(outputs[static_cast<std::size_t>(b)], expected[static_cast<std::size_t>(b)]) << b;
  }
}

TEST(Attend, TokensOfOneQuestionGiveTheSameBitsOneByOne) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 4});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(300);
  const auto select_some = [&](const QueryBlock& block) {
    Selection out;
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      for (int head = 0; head < 2; ++head) {
        out.add_set({0, head, all_heads(4), static_cast<std::int32_t>(t), static_cast<std::int32_t>(t + 1)});
        for (Position row = block.far_begin; row < block.far_end(t, geometry.dense); row += 3)
          out.add_row(row);
      }
    }
    return out;
  };
  const QueryBlock block = world.block(280, 20);
  const std::vector<float> whole = run(block, select_some(block), geometry).output;
  for (Position p = 280; p < 300; ++p) {
    const QueryBlock one = world.block(p, 1);
    const std::vector<float> output = run(one, select_some(one), geometry).output;
    EXPECT_TRUE(std::equal(output.begin(), output.end(), whole.begin() + (p - 280) * std::ssize(output)))
        << p;
  }
}

TEST(Attend, WorkIsCountedPerKvHeadAndToken) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 64, .type = DType::q8, .dense = {2, 10}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(100);
  const QueryBlock block = world.block(98, 2);  // far keys: [2, 89) and [2, 90)
  Selection selection;
  selection.add_set({0, 0, 1, 0, 2});  // both tokens, first head: row 89 is far for the second token only
  selection.add_rows(std::vector<Position>{5, 88, 89});
  selection.add_set({0, 0, 2, 0, 2});
  selection.add_run(5, 7);
  const AttendWork work = run(block, selection, geometry).work;
  EXPECT_EQ(work.dense_keys, 2 * 12);
  EXPECT_EQ(work.far_total, 87 + 88);
  EXPECT_EQ(work.far_keys, 2 + 3 + 2 + 2);
  EXPECT_EQ(work.full_keys, 99 + 100);
  const std::int64_t token_bytes = 2 * (64 + 4);
  EXPECT_EQ(work.kv_bytes, (24 + 9) * token_bytes);
  EXPECT_EQ(work.full_bytes, 199 * token_bytes);
  const AttendWork full = run_full(block, geometry).work;
  EXPECT_EQ(full.kv_bytes, full.full_bytes);
  EXPECT_EQ(full.far_keys, full.far_total);
  EXPECT_EQ(full.far_total, 175);
}

TEST(Attend, NoHeadCountsMoreKeysThanAreLeftToIt) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .group = 2, .d = 64, .dense = {2, 10}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(100);
  const QueryBlock block = world.block(99, 1);  // far keys: [2, 90)
  Selection selection;
  for (const std::uint32_t heads : {1u, 2u}) {  // of the first KV head both find nearly all
    selection.add_set({0, 0, heads, 0, 1});
    selection.add_run(2, 80);
  }
  selection.add_set({0, 1, 3, 0, 1});
  selection.add_run(5, 9);
  EXPECT_EQ(count_attended({&block, 1}, selection, geometry).far_keys, 88 + 4);
  const std::vector<std::int64_t> elsewhere = {30, 50};
  EXPECT_EQ(count_attended({&block, 1}, selection, geometry, elsewhere).far_keys, 58 + 4);
}

TEST(Attend, TailsMergeAsIfTheyWereKeys) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 3, .d = 64});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(120);
  const QueryBlock block = world.block(118, 2);
  // Half of the far keys are attended, the other half comes as the exact state of a tail.
  Selection with_tail, all;
  for (int head = 0; head < 2; ++head) {
    for (std::int32_t t = 0; t < 2; ++t) {
      for (const std::uint32_t heads : {0b101u, 0b010u}) {
        const Position far_end = block.far_end(t, geometry.dense);
        with_tail.add_set({0, head, heads, t, t + 1});
        with_tail.add_run(1, 50);
        all.add_set({0, head, heads, t, t + 1});
        all.add_run(1, far_end);
        std::vector<float> output, lse;
        for (int g = 0; g < 3; ++g) {
          if ((heads >> g & 1) == 0) continue;
          FarSet rest;
          for (Position p = 50; p < far_end; ++p) rest.emplace(p, 0.0f);
          // Attention over the rest alone: a block whose sink and window are empty.
          double lse_of_rest = 0;
          LayerGeometry bare = geometry;
          bare.dense = {0, 1};
          QueryBlock shifted = block;
          shifted.far_begin = 0;
          std::vector<double> o = attend_exactly(world, shifted, bare, t, head * 3 + g, rest, &lse_of_rest);
          // Its window holds the token itself: take it out again.
          double own = 0;
          const std::vector<double> self = attend_exactly(world, shifted, bare, t, head * 3 + g, {}, &own);
          const double w = std::exp(own - lse_of_rest);
          for (std::size_t i = 0; i < o.size(); ++i)
            output.push_back(static_cast<float>((o[i] - w * self[i]) / (1 - w)));
          lse.push_back(static_cast<float>(lse_of_rest + std::log1p(-w)));
        }
        with_tail.set_tail(output, lse);
      }
    }
  }
  const std::vector<float> output = run(block, with_tail, geometry).output;
  expect_exact(world, block, all, geometry, output);
  // What the keys beside a tail get of the attention is what they get beside its keys.
  const auto masses = [&](const Selection& selection) {
    std::map<std::tuple<Position, int, Position>, float> mass;  // of query, KV head, row
    run(block, selection, geometry, [&](const AttentionMass& m) {
      for (std::size_t i = 0; i < m.rows.size(); ++i) mass[{m.query, m.kv_head, m.rows[i]}] += m.mass[i];
    });
    return mass;
  };
  const auto whole = masses(all), beside = masses(with_tail);
  EXPECT_LT(beside.size(), whole.size());
  for (const auto& [key, mass] : beside) EXPECT_NEAR(mass, whole.at(key), 1e-5);
}

TEST(Attend, MassOfEachKeySumsToTheHeads) {
  ThreadPool pool(2);
  Rng rng(4);
  for (const auto& [type, full] : {std::pair{DType::f32, false},
                                   {DType::f32, true},
                                   {DType::bf16, false},
                                   {DType::bf16, true},
                                   {DType::f16, true},
                                   {DType::q8, true}}) {
    World world({.kv_heads = 2, .group = 3, .d = 64, .type = type});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(90);
    const QueryBlock block = world.block(80, 10);
    Selection selection = random_selection(block, geometry, rng, true);
    if (full) {
      selection.clear();
      make_full_selector(geometry)->select({&block, 1}, selection);
    }
    const std::vector<FarSet> far = far_sets(selection, block, geometry);
    std::vector<double> mass_of_queries(20, 0.0);
    double weight_of_first = 0;
    const MassSink sink = [&](const AttentionMass& mass) {
      EXPECT_TRUE(std::is_sorted(mass.rows.begin(), mass.rows.end()));
      EXPECT_EQ(std::adjacent_find(mass.rows.begin(), mass.rows.end()), mass.rows.end());
      for (std::size_t i = 0; i < mass.rows.size(); ++i) {
        mass_of_queries[static_cast<std::size_t>((mass.query - 80) * 2 + mass.kv_head)] += mass.mass[i];
        if (mass.rows[i] == 0 && mass.kv_head == 0 && mass.query == 85) weight_of_first += mass.mass[i];
      }
    };
    full ? run_full(block, geometry, sink) : run(block, selection, geometry, sink);
    for (const double mass : mass_of_queries) EXPECT_NEAR(mass, 3.0, 1e-4);
    double expected = 0;
    for (int g = 0; g < 3; ++g) {
      double lse = 0, s = 0;
      attend_exactly(world, block, geometry, 5, g, far[static_cast<std::size_t>(5 * 6 + g)], &lse);
      const std::vector<float> k = world.key(0, 0);
      for (int i = 0; i < 64; ++i)
        s += static_cast<double>(block.q[static_cast<std::size_t>((5 * 6 + g) * 64 + i)]) *
             k[static_cast<std::size_t>(i)];
      expected += std::exp(s * geometry.scale - lse);
    }
    EXPECT_NEAR(weight_of_first, expected, 1e-5);
  }
}

using Masses = std::map<std::pair<int, Position>, float>;  // of KV head and row

MassSink into(Masses& masses, float least = 0.0f) {
  return {[&masses](const AttentionMass& mass) {
            EXPECT_TRUE(std::is_sorted(mass.rows.begin(), mass.rows.end()));
            for (std::size_t i = 0; i < mass.rows.size(); ++i)
              masses[{mass.kv_head, mass.rows[i]}] += mass.mass[i];
          },
          least};
}

/// Whatever got `least` from one of the heads at least is in `some`, with the mass that it has in `all`.
void expect_large(const Masses& all, const Masses& some, float least, int group, float tolerance) {
  EXPECT_LT(some.size(), all.size());
  int large = 0;
  for (const auto& [key, mass] : all) {
    if (mass < least * static_cast<float>(group)) continue;
    ++large;
    ASSERT_TRUE(some.contains(key)) << "KV head " << key.first << " row " << key.second << " mass " << mass;
  }
  EXPECT_GT(large, 0);
  for (const auto& [key, mass] : some) EXPECT_NEAR(mass, all.at(key), tolerance);
}

TEST(Attend, LargeMassesAreThoseAmongAll) {
  constexpr float kLeast = 0.05f;
  ThreadPool pool(2);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4}) {
    World world({.kv_heads = 2, .group = 3, .d = 64, .type = type, .max_tokens = 6000});
    // Two places draw attention: one in the midst of a stretch, one at the border of two.
    world.shape_key = [](Position p, int, int, float x) { return p == 1500 || p == 3072 ? 2.5f * x : x; };
    const LayerGeometry geometry = world.geometry(pool);
    world.write(5500);
    const QueryBlock block = world.block(5499, 1);
    const float tolerance = type == DType::bf16 ? 0.03f : 1e-4f;  // bf16's kernels may round queries
    Masses all, some;
    run_full(block, geometry, into(all));
    run_full(block, geometry, into(some, kLeast));
    expect_large(all, some, kLeast, 3, tolerance);
    // The same of a branch: rows [0, 5000) are the document's, the others its own.
    KvLayer document = block.kv, own = block.kv;
    std::vector<KvRows> front(document.heads.begin(), document.heads.end()), behind = front;
    for (KvRows& head : front) head.rows = 5000;
    for (KvRows& head : behind) {
      const std::int64_t row = row_bytes_of(type, 64), scales = head.k_scale == nullptr ? 0 : 5000;
      head.k += 5000 * row, head.v += 5000 * row, head.rows -= 5000;
      if (scales > 0) head.k_scale += scales, head.v_scale += scales;
    }
    QueryBlock branch = block;
    branch.kv.heads = front, branch.far_limit = 5000;
    own.heads = behind;
    const TailRows rows = {.kv = own, .seam = 5000};
    std::vector<float> output(block.q.size());
    float* const to = output.data();
    Masses of_branch;
    attend_branches(
        {.blocks = {&branch, 1}, .tails = {&rows, 1}, .outputs = {&to, 1}, .selections = {}, .work = {}},
        geometry, into(of_branch, kLeast));
    expect_large(all, of_branch, kLeast, 3, tolerance);
    EXPECT_TRUE(of_branch.contains({0, 5499}));  // a branch's own keys are all there
  }
}

TEST(Attend, LargeMassesOfANaNAreNaN) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 64, .max_tokens = 4096});
  world.shape_key = [](Position p, int, int, float x) { return p == 700 ? std::nanf("") : x; };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  const QueryBlock block = world.block(2999, 1);
  Masses masses;
  run_full(block, geometry, into(masses, 0.05f));
  ASSERT_TRUE(masses.contains({0, 700}));
  EXPECT_TRUE(std::isnan(masses.at({0, 700})));
}

TEST(Attend, TextsShorterThanTheSink) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {100, 4}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(30);
  for (const std::int64_t tokens : {1, 30}) {
    const QueryBlock block = world.block(static_cast<Position>(30 - tokens), tokens);
    Selection selection;
    selection.add_set({0, 0, 3, 0, static_cast<std::int32_t>(tokens)});
    const Result result = run(block, selection, geometry);
    EXPECT_EQ(result.output, run_full(block, geometry).output);
    expect_exact(world, block, selection, geometry, result.output);
  }
}

}  // namespace
}  // namespace lode::test
