// SPDX-License-Identifier: Apache-2.0
// InfLLM: representatives, relevance and choice follow from their definitions, in float64, with queries heard
// and without; budgets are exact; an index that grows equals one that was built.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/budgets.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

struct Rule {
  std::int64_t block = 16, representatives = 4, topk = 3;
  bool per_layer = true, one_angle = true, told = true;

  std::string spec() const {
    return "infllm:block_size=" + std::to_string(block) + ",repr_topk=" + std::to_string(representatives) +
           ",topk=" + std::to_string(topk) + (per_layer ? "" : ",per=kv-head") +
           (one_angle ? "" : ",rope=on");
  }
};

class Oracle {
 public:
  Oracle(World& world, const LayerGeometry& geometry, const Rule& rule, std::int64_t context)
      : world_(world), geometry_(geometry), rule_(rule), context_(context) {
    const QueryBlock block = world.block(0, context);
    q_.assign(block.q.begin(), block.q.end());
  }

  /// Keys of a block that stand for it.
  std::vector<Position> representatives(int head, std::int64_t block) const {
    const auto first = static_cast<Position>(1 + block * rule_.block);
    std::vector<Position> rows(static_cast<std::size_t>(rule_.block));
    std::iota(rows.begin(), rows.end(), first);
    const std::int64_t from = first + rule_.block,
                       window = (geometry_.dense.window + rule_.block - 1) / rule_.block * rule_.block,
                       to = std::min(context_, from + window);
    if (!rule_.told || from >= to) return rows;
    std::vector<std::pair<double, Position>> order;
    for (const Position row : rows) {
      double score = 0;
      const std::vector<float> key = world_.key(row, head);
      for (std::int64_t t = from; t < to; ++t) {
        for (int g = 0; g < geometry_.group(); ++g) {
          for (int c = 0; c < geometry_.head_dim; ++c)
            score +=
                static_cast<double>(q_[static_cast<std::size_t>(
                    (t * geometry_.query_heads + head * geometry_.group() + g) * geometry_.head_dim + c)]) *
                key[static_cast<std::size_t>(c)];
        }
      }
      order.emplace_back(-score, -row);
    }
    std::sort(order.begin(), order.end());
    order.resize(static_cast<std::size_t>(std::min(rule_.representatives, rule_.block)));
    rows.clear();
    for (const auto& [score, row] : order) rows.push_back(-row);
    return rows;
  }

  /// Mean score of a block's representatives, summed over the heads of a group.
  double relevance(const QueryBlock& block, std::int64_t t, int head, std::int64_t which) const {
    const std::vector<Position> rows = representatives(head, which);
    double sum = 0;
    for (int g = 0; g < geometry_.group(); ++g) {
      const auto at = static_cast<std::size_t>((t * geometry_.query_heads + head * geometry_.group() + g) *
                                               geometry_.head_dim);
      const auto all = rule_.one_angle ? block.q_unrotated : block.q;
      std::vector<float> q(all.begin() + static_cast<std::ptrdiff_t>(at),
                           all.begin() + static_cast<std::ptrdiff_t>(at) + geometry_.head_dim);
      if (rule_.one_angle) world_.rope().rotate(q, static_cast<Position>(geometry_.dense.window));
      for (const Position row : rows) {
        std::vector<float> key = world_.key(row, head);
        if (rule_.one_angle) world_.rope().unrotate(key, row);
        for (std::size_t c = 0; c < key.size(); ++c) sum += static_cast<double>(q[c]) * key[c];
      }
    }
    return sum / static_cast<double>(rows.size());
  }

  FarSet choice(const QueryBlock& block, std::int64_t t, int head) const {
    const Position end = block.far_end(t, geometry_.dense);
    const std::int64_t blocks = (end - 1) / rule_.block;
    std::vector<std::pair<double, std::int64_t>> order;
    for (std::int64_t b = 0; b < blocks; ++b) {
      double score = 0;
      for (int h = 0; h < geometry_.kv_heads; ++h) {
        if (rule_.per_layer || h == head) score += relevance(block, t, h, b);
      }
      order.emplace_back(-score, -b);
    }
    std::sort(order.begin(), order.end());
    order.resize(static_cast<std::size_t>(std::min(rule_.topk, blocks)));
    FarSet rows;
    for (auto p = static_cast<Position>(1 + blocks * rule_.block); p < end; ++p) rows.emplace(p, 0.0f);
    for (const auto& [score, b] : order) {
      for (std::int64_t i = 0; i < rule_.block; ++i)
        rows.emplace(static_cast<Position>(1 - b * rule_.block + i), 0.0f);
    }
    return rows;
  }

 private:
  World& world_;
  const LayerGeometry& geometry_;
  Rule rule_;
  std::int64_t context_;
  std::vector<float> q_;  // [context, Hq, d]
};

TEST(InfLlm, AttendsTheMostRelevantBlocks) {
  ThreadPool pool(2);
  for (const Rule& rule : {Rule{}, Rule{.per_layer = false}, Rule{.one_angle = false}, Rule{.told = false},
                           Rule{.block = 7, .representatives = 20, .topk = 5},
                           Rule{.block = 1, .representatives = 1, .topk = 9, .per_layer = false}}) {
    World world({.kv_heads = 2, .group = 3, .d = 64, .type = DType::f16, .dense = {1, 20}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(230);
    const auto selector = make(rule.spec(), geometry);
    if (rule.told) tell(*selector, world, 230, 33);
    selector->build(0, world.store().layer(0));
    const Oracle oracle(world, geometry, rule, 230);
    world.write(60);
    const QueryBlock block = world.block(287, 3);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 3; ++t) {
      for (int h = 0; h < 6; ++h)
        EXPECT_EQ(found[static_cast<std::size_t>(t * 6 + h)], oracle.choice(block, t, h / 3)) << rule.spec();
    }
  }
}

TEST(InfLlm, BudgetsAreExactAndTiesGoToTheNewest) {
  expect_exact_budgets("infllm", 2, {1, 26, 27, 28, 127, 128, 155, 156, 282, 283, 284, 100000});
}

TEST(InfLlm, GrownEqualsRebuiltAndBytesAreCounted) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 64, .type = DType::q8, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "infllm:block_size=8,topk=4";
  const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
  world.write(500);
  tell(*grown, world, 500, 13);
  tell(*rebuilt, world, 500, 500);
  for (Selector* selector : {grown.get(), rebuilt.get()}) selector->build(0, world.store().layer(0));
  grow_and_roll_back(world, *grown);
  const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 1), 1);
  SelectWork work;
  EXPECT_EQ(select(*grown, block, geometry), select(*rebuilt, block, geometry, &work));
  const std::int64_t blocks = (world.tokens() - 1 - 16) / 8;
  EXPECT_EQ(work.bytes, 2 * blocks * 64 * 4);
  EXPECT_EQ(work.keys_scored, 2 * blocks);
  EXPECT_EQ(find_method("infllm").index_bytes(parse_spec(spec), geometry, 800), 2 * 100 * 64 * 4);
}

// A prefill that is taken up again somewhere before its end hears the later queries anew.
TEST(InfLlm, PrefillThatIsTakenBackIsForgotten) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 32}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(300);
  const auto once = make("infllm:block_size=16,topk=2", geometry),
             again = make("infllm:block_size=16,topk=2", geometry);
  tell(*once, world, 300);
  tell(*again, world, 300);
  again->roll_back(0, 113);  // a block's border: 1 + 7 * 16
  const QueryBlock rest = world.block(113, 187);
  again->on_write({.sequence = 0,
                   .phase = Phase::context,
                   .begin = 113,
                   .tokens = 187,
                   .q_unrotated = rest.q_unrotated,
                   .k_unrotated = {},
                   .q = rest.q,
                   .k = {},
                   .v = {}});
  for (Selector* selector : {once.get(), again.get()}) selector->build(0, world.store().layer(0));
  const QueryBlock block = world.block(290, 10);
  EXPECT_EQ(select(*once, block, geometry), select(*again, block, geometry));
}

TEST(InfLlm, SpecsOutOfRangeAreRefused) {
  for (const char* spec :
       {"infllm:block_size=0", "infllm:repr_topk=0", "infllm:topk=0", "infllm:topk=3,budget=9",
        "infllm:budget=0", "infllm:per=query-head", "infllm:rope=off"})
    expect_refused("infllm", [&] { parse_spec(spec); });
}

}  // namespace
}  // namespace lode::test
