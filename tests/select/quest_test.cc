// SPDX-License-Identifier: Apache-2.0
// Quest: what is attended follows from bounds as the paper writes them, computed here key by key in float64;
// budgets are exact; coded bounds stay bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "ann/packed_codes.h"
#include "lodestone/error.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

struct Rule {
  std::int64_t page = 16, budget = 1;
  bool per_kv_head = false;
  int bits = 16;
};

/// Bounds and choice by their definitions.
class Oracle {
 public:
  Oracle(const World& world, const QueryBlock& block, const LayerGeometry& geometry, std::int64_t context)
      : world_(world), block_(block), geometry_(geometry), context_(context) {}

  /// Of a page's keys in one channel; coded bounds have levels of the context's keys.
  std::pair<double, double> extremes(int head, Position first, const Rule& rule, int c) const {
    const auto at = static_cast<std::size_t>(c);
    float low = std::numeric_limits<float>::infinity(), high = -low;
    const auto widen = [&](Position p) {
      low = std::min(low, key(p, head)[at]);
      high = std::max(high, key(p, head)[at]);
    };
    for (Position p = first; p < first + rule.page; ++p) widen(p);
    if (rule.bits == 16) return {low, high};
    float least = std::numeric_limits<float>::infinity(), largest = -least;
    for (Position p = block_.far_begin; p < context_; ++p) {
      least = std::min(least, key(p, head)[at]);
      largest = std::max(largest, key(p, head)[at]);
    }
    const ChannelLevels levels(rule.bits, {&least, 1}, {&largest, 1});
    return {levels.value(0, levels.code(0, low, ChannelLevels::Rounding::down)),
            levels.value(0, levels.code(0, high, ChannelLevels::Rounding::up))};
  }

  double bound(std::int64_t token, const std::vector<int>& heads, Position first, const Rule& rule) const {
    double sum = 0;
    for (int c = 0; c < geometry_.head_dim; ++c) {
      const auto [low, high] = extremes(heads[0] / geometry_.group(), first, rule, c);
      for (const int h : heads) {
        const double q =
            block_.q[static_cast<std::size_t>((token * geometry_.query_heads + h) * geometry_.head_dim + c)];
        sum += std::max(q * low, q * high);
      }
    }
    return sum;
  }

  FarSet choice(std::int64_t token, int query_head, const Rule& rule) const {
    std::vector<int> heads = {query_head};
    if (rule.per_kv_head) {
      heads.clear();
      for (int g = 0; g < geometry_.group(); ++g)
        heads.push_back(query_head / geometry_.group() * geometry_.group() + g);
    }
    const Position end = block_.far_end(token, geometry_.dense);
    const std::int64_t n = end - block_.far_begin, pages = n / rule.page;
    FarSet rows;
    std::int64_t left = rule.budget;
    for (Position p = end; left > 0 && p > block_.far_begin + pages * rule.page; --left)
      rows.emplace(--p, 0.0f);
    std::vector<std::pair<double, std::int64_t>> order;
    for (std::int64_t page = 0; page < pages; ++page)
      order.emplace_back(
          -bound(token, heads, static_cast<Position>(block_.far_begin + page * rule.page), rule), -page);
    std::sort(order.begin(), order.end());
    for (const auto& [score, page] : order) {
      auto p = static_cast<Position>(block_.far_begin + (1 - page) * rule.page);
      for (std::int64_t i = 0; i < rule.page && left > 0; ++i, --left) rows.emplace(--p, 0.0f);
    }
    return rows;
  }

 private:
  const std::vector<float>& key(Position row, int head) const {
    std::vector<float>& known = keys_[{row, head}];
    if (known.empty()) known = world_.key(row, head);
    return known;
  }
  mutable std::map<std::pair<Position, int>, std::vector<float>> keys_;
  const World& world_;
  const QueryBlock& block_;
  const LayerGeometry& geometry_;
  std::int64_t context_;
};

std::string spec_of(const Rule& rule) {
  return "quest:page_size=" + std::to_string(rule.page) + ",budget=" + std::to_string(rule.budget) +
         ",bits=" + std::to_string(rule.bits) + (rule.per_kv_head ? ",per=kv-head" : "");
}

TEST(Quest, AttendsThePagesWithTheLargestBounds) {
  ThreadPool pool(2);
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    World world({.kv_heads = 2, .group = 3, .d = 64, .type = type, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(160);
    for (const Rule& rule : {Rule{16, 48}, Rule{16, 41, true}, Rule{5, 1}, Rule{1, 7}, Rule{16, 5000},
                             Rule{16, 50, false, 4}, Rule{16, 50, true, 2}, Rule{7, 30, false, 2}}) {
      const auto selector = make(spec_of(rule), geometry);
      selector->build(0, world.store().layer(0));
      const QueryBlock block = world.block(156, 4);
      const Oracle oracle(world, block, geometry, 160);
      const std::vector<FarSet> found = select(*selector, block, geometry);
      for (std::int64_t t = 0; t < 4; ++t) {
        for (int h = 0; h < 6; ++h)
          EXPECT_EQ(found[static_cast<std::size_t>(t * 6 + h)], oracle.choice(t, h, rule)) << spec_of(rule);
      }
    }
  }
}

// The trap of bounds that are none: stored q8 keys have scales of their own, coded bounds levels.
TEST(Quest, CodedBoundsStayBounds) {
  Rng rng(2);
  std::vector<float> x(500), edges = {-3e38f, 3e38f, 0.0f, -0.0f, 1e-40f, 1.0f};
  for (float& value : x) value = static_cast<float>(rng.normal());
  x[7] = 40.0f;  // one number far from the others
  for (const std::vector<float>& numbers : {x, edges, std::vector<float>(3, 0.25f)}) {
    const auto [low, high] = std::minmax_element(numbers.begin(), numbers.end());
    for (const int bits : {2, 4}) {
      const ChannelLevels levels(bits, {&*low, 1}, {&*high, 1});
      for (const float value : numbers) {
        const double slack =
            1e-6 * std::max(std::abs(static_cast<double>(*low)), std::abs(static_cast<double>(*high)));
        EXPECT_LE(levels.value(0, levels.code(0, value, ChannelLevels::Rounding::down)), value + slack);
        EXPECT_GE(levels.value(0, levels.code(0, value, ChannelLevels::Rounding::up)), value - slack);
        const double near = levels.value(0, levels.code(0, value, ChannelLevels::Rounding::nearest));
        EXPECT_LE(std::abs(near - value), 0.5 * static_cast<double>(levels.step[0]) + slack);
      }
      EXPECT_EQ(levels.code(0, std::numeric_limits<float>::infinity(), ChannelLevels::Rounding::up),
                levels.step[0] > 0 ? (1u << bits) - 1u : 0u);
    }
  }
}

// A key that stands out is in a page whose bound is at least its score, so it is found in one page, however
// its page's other keys look and however the bounds are coded; q8 keys have scales of their own.
TEST(Quest, FindsTheKeyThatStandsOut) {
  ThreadPool pool(1);
  for (const DType type : {DType::f32, DType::q8, DType::q4}) {
    for (const char* bits : {"16", "4", "2"}) {
      World world({.kv_heads = 1, .group = 1, .d = 64, .type = type, .dense = {1, 16}});
      const LayerGeometry geometry = world.geometry(pool);
      constexpr Position kNeedle = 77;
      world.shape_key = [](Position p, int, int, float x) { return p == kNeedle ? 8.0f * x : 0.5f * x; };
      world.write(300);
      const auto selector = make(std::string("quest:budget=32,bits=") + bits, geometry);
      selector->build(0, world.store().layer(0));
      QueryBlock block = world.block(299, 1);
      const std::vector<float> q = world.key(kNeedle, 0);
      block.q = q;
      EXPECT_TRUE(select(*selector, block, geometry)[0].contains({kNeedle, 0.0f}));
    }
  }
}

TEST(Quest, BudgetsAreExactAndTiesGoToTheNewest) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 16}});
  world.shape_key = [](Position, int, int, float) { return 0.0f; };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(300);
  const QueryBlock block = world.block(299, 1);
  const Position end = block.far_end(0, geometry.dense);
  for (const std::int64_t budget : {1, 10, 11, 12, 16, 17, 32, 100, 282, 283, 284, 100000}) {
    const std::vector<FarSet> found =
        select(*make("quest:budget=" + std::to_string(budget), geometry), block, geometry);
    FarSet newest;
    for (Position p = end; p > 1 && std::ssize(newest) < budget;) newest.emplace(--p, 0.0f);
    EXPECT_EQ(found[0], newest) << budget;
    EXPECT_EQ(found[1], newest) << budget;
  }
}

TEST(Quest, GrownEqualsRebuiltAndBytesAreCounted) {
  ThreadPool pool(2);
  for (const auto& [bits, page_bytes] : {std::pair{"16", 2 * 64 * 2}, {"4", 2 * 64 / 2}, {"2", 2 * 64 / 4}}) {
    World world(
        {.kv_heads = 2, .group = 2, .d = 64, .type = DType::bf16, .dense = {1, 16}, .max_tokens = 8192});
    const LayerGeometry geometry = world.geometry(pool);
    const std::string spec = std::string("quest:budget=90,bits=") + bits;
    const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
    world.write(2500);  // more pages than codes of one block
    grown->build(0, world.store().layer(0));
    rebuilt->build(0, world.store().layer(0));
    for (int i = 0; i < 40; ++i) {
      world.write(13);
      grown->append(0, world.store().layer(0), static_cast<Position>(world.tokens() - 16));
      if (i % 10 == 9) {
        world.store().roll_back(world.tokens() - 100);
        grown->roll_back(0, world.tokens());
      }
    }
    const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 1), 1);
    SelectWork work;
    EXPECT_EQ(select(*grown, block, geometry), select(*rebuilt, block, geometry, &work));
    const std::int64_t pages = (world.tokens() - 1 - 16) / 16;
    EXPECT_EQ(work.bytes, 2 * pages * page_bytes);
    EXPECT_EQ(work.keys_scored, 2 * pages);
    const Spec parsed = parse_spec(spec);
    EXPECT_EQ(find_method("quest").index_bytes(parsed, geometry, 1600), 2 * 100 * page_bytes);
  }
}

TEST(Quest, SpecsOutOfRangeAreRefused) {
  for (const char* spec : {"quest:page_size=0", "quest:page_size=5000", "quest:budget=0", "quest:budget=0.0",
                           "quest:bits=8", "quest:per=layer", "quest:pages=3", "quest:budget=1.5"})
    expect_refused("quest", [&] { parse_spec(spec); });
  const Spec spec = parse_spec("quest");
  EXPECT_EQ(spec.dense.sink, 1);
  EXPECT_EQ(spec.dense.window, 2047);
  EXPECT_EQ(spec.dense_layers, 2);
}

}  // namespace
}  // namespace lode::test
