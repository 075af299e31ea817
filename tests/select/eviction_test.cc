// SPDX-License-Identifier: Apache-2.0
// snapkv and h2o against their definitions in float64: votes and sums of softmax weights, kept keys, and keys
// dropped one after the other.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "attend/attend.h"
#include "select/shared/branches.h"
#include "support/damaged_index.h"
#include "support/forged_index.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

/// Softmax weights of one query over keys [0, end) of a KV head.
std::vector<double> weights(const World& world, const LayerGeometry& geometry, const float* q, int kv_head,
                            std::int64_t end, bool rounded = false) {
  std::vector<double> w;
  double peak = -std::numeric_limits<double>::infinity(), sum = 0;
  for (Position p = 0; p < end; ++p) {
    const std::vector<float> k = world.key(p, kv_head);
    double dot = 0;
    for (std::size_t i = 0; i < k.size(); ++i)
      dot += static_cast<double>(rounded ? to_float(to_bf16(q[i])) : q[i]) * k[i];
    w.push_back(dot * geometry.scale);
    peak = std::max(peak, w.back());
  }
  for (double& x : w) sum += x = std::exp(x - peak);
  for (double& x : w) x /= sum;
  return w;
}

/// The `count` of [begin, end) with the largest scores, ties to the newer.
std::vector<Position> best(const std::vector<double>& scores, std::int64_t count, Position begin,
                           Position end) {
  std::vector<Position> order(static_cast<std::size_t>(std::max(0, end - begin)));
  std::iota(order.begin(), order.end(), begin);
  std::sort(order.begin(), order.end(), [&](Position a, Position b) {
    return std::pair(scores[static_cast<std::size_t>(a)], a) >
           std::pair(scores[static_cast<std::size_t>(b)], b);
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  return order;
}

FarSet far_set(const std::vector<Position>& rows, Position from, Position to) {
  FarSet far;
  for (const Position row : rows) far.emplace(row, 0.0f);
  for (Position row = from; row < to; ++row) far.emplace(row, 0.0f);
  return far;
}

TEST(SnapKv, KeepsTheKeysOfMostPooledVotes) {
  ThreadPool pool(2);
  struct Case {
    const char* keys;
    int window, kernel, budget;
    bool maximum, shared;
  };
  for (const Case& c :
       {Case{"window_size=8,max_capacity_prompt=28", 8, 5, 20, false, false},
        Case{"window_size=40,max_capacity_prompt=51,kernel_size=7,pooling=maxpool", 40, 7, 11, true, false},
        Case{"window_size=8,max_capacity_prompt=13,kernel_size=1,per=kv-head", 8, 1, 5, false, true},
        Case{"window_size=1,max_capacity_prompt=10%,pooling=maxpool,per=kv-head", 1, 5, 13, true, true}}) {
    World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {3, 20}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(150);
    const auto selector = make(std::string("snapkv:") + c.keys, geometry);
    tell(*selector, world, 150, 37);
    selector->build(0, world.store().layer(0));
    const auto from = static_cast<Position>(150 - std::max(20, c.window));
    std::vector<std::vector<double>> votes(4, std::vector<double>(150, 0.0));
    const QueryBlock observers = world.block(static_cast<Position>(150 - c.window), c.window);
    for (int h = 0; h < 4; ++h) {
      for (int t = 0; t < c.window; ++t) {
        const std::vector<double> w =
            weights(world, geometry, observers.q.data() + (t * 4 + h) * 32, h / 2, 150 - c.window + t + 1);
        for (int k = 0; k < 150 - c.window; ++k)
          votes[static_cast<std::size_t>(c.shared ? h / 2 * 2 : h)][static_cast<std::size_t>(k)] +=
              w[static_cast<std::size_t>(k)];
      }
    }
    world.write(30);
    const QueryBlock block = world.block(170, 10);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (int h = 0; h < 4; ++h) {
      const std::vector<double>& own = votes[static_cast<std::size_t>(c.shared ? h / 2 * 2 : h)];
      std::vector<double> pooled(150, 0.0);
      for (int k = 0; k < 150 - c.window; ++k) {
        for (int j = k - c.kernel / 2; j <= k + c.kernel / 2; ++j) {
          const double vote = j < 0 || j >= 150 - c.window ? 0.0 : own[static_cast<std::size_t>(j)];
          double& p = pooled[static_cast<std::size_t>(k)];
          p = c.maximum ? std::max(p, vote) : p + vote / c.kernel;
        }
      }
      // Equal maxima are cut at the newer key, so that float and double agree.
      const std::vector<Position> rows = best(pooled, c.budget, 3, from);
      for (std::int64_t t = 0; t < 10; ++t)
        EXPECT_EQ(found[static_cast<std::size_t>(t * 4 + h)],
                  far_set(rows, from, block.far_end(t, geometry.dense)))
            << c.keys << " " << h;
    }
  }
}

/// A prompt behind an indexed text, as a branch sees it and in place.
struct PromptBehind {
  PromptBehind(World& world, std::int64_t context) {
    const KvLayer all = world.store().layer(0);
    for (const KvRows& head : all.heads) {
      kv_rows.push_back(head);
      kv_rows.back().rows = context;
      tail_rows.push_back(head);
      tail_rows.back().k += context * head.row_bytes();
      tail_rows.back().v += context * head.row_bytes();
      tail_rows.back().rows -= context;
    }
    kv = {.heads = kv_rows, .tokens = context};
    tail = {.heads = tail_rows, .tokens = all.tokens - context};
  }
  std::vector<KvRows> kv_rows, tail_rows;
  KvLayer kv, tail;
};

/// Tells a sequence of a prompt of tokens [begin, begin + tokens) in pieces.
void tell_prompt(Selector& selector, World& world, std::int32_t sequence, Position begin,
                 std::int64_t tokens) {
  prompt_chooser(&selector)->begin_prompt(sequence, begin);
  for (std::int64_t at = 0; at < tokens; at += 7) {
    const std::int64_t count = std::min<std::int64_t>(7, tokens - at);
    const QueryBlock block = world.block(static_cast<Position>(begin + at), count);
    selector.on_write({.sequence = sequence,
                       .phase = Phase::question,
                       .begin = block.begin,
                       .tokens = count,
                       .q = block.q});
  }
}

// A prompt shorter than the window is filled up by the text's last tokens.
TEST(SnapKv, PromptsVoteForTheirOwnSequence) {
  ThreadPool pool(2);
  for (const int window : {8, 30}) {
    World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {3, 10}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(150);
    const std::string spec = "snapkv:kernel_size=1,window_size=" + std::to_string(window) +
                             ",max_capacity_prompt=" + std::to_string(window + 20);
    const auto selector = make(spec, geometry), in_place = make(spec, geometry);
    for (Selector* const one : {selector.get(), in_place.get()}) {
      tell(*one, world, 150, 37);
      one->build(0, world.store().layer(0));
    }
    world.write(20);
    const auto by_text = select(*selector, world.block(169, 1), geometry);
    const PromptBehind rows(world, 150);
    prompt_chooser(selector.get())->branch(7);
    tell_prompt(*selector, world, 7, 150, 20);
    prompt_chooser(selector.get())->choose_by_prompt(7, rows.kv, rows.tail);
    tell_prompt(*in_place, world, 0, 150, 20);
    prompt_chooser(in_place.get())->choose_by_prompt(0, world.store().layer(0), {});

    const auto from = static_cast<Position>(std::min(150, 170 - std::max(10, window)));
    const QueryBlock observers = world.block(static_cast<Position>(170 - window), window);
    const std::vector<float> q(observers.q.begin(), observers.q.end());
    std::vector<FarSet> expected;
    for (int h = 0; h < 4; ++h) {
      std::vector<double> votes(150, 0.0);
      for (int t = 0; t < window; ++t) {
        const auto w = weights(world, geometry, q.data() + (t * 4 + h) * 32, h / 2, 170 - window + t + 1);
        for (std::size_t k = 0; k < votes.size(); ++k) votes[k] += w[k];
      }
      expected.push_back(far_set(best(votes, 20, 3, from), from, 160));
    }
    QueryBlock asking = world.block(169, 1);
    EXPECT_EQ(select(*in_place, asking, geometry), expected) << window;
    EXPECT_EQ(select(*selector, asking, geometry), by_text) << "the document's own choice stays";
    EXPECT_NE(expected, by_text);
    asking.sequence = 7;
    EXPECT_EQ(select(*selector, asking, geometry), expected) << window;
    in_place->roll_back(0, 169);
    EXPECT_EQ(select(*in_place, world.block(169, 1), geometry), by_text) << "of a prompt that is cut";
    selector->roll_back(7, 150);
    EXPECT_EQ(select(*selector, asking, geometry), by_text);
  }
}

TEST(SnapKv, WithoutVotesTheNewestAreKept) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 32, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  const auto selector = make("snapkv:window_size=8,max_capacity_prompt=18", geometry);
  selector->build(0, world.store().layer(0));
  SelectWork work;
  const auto found = select(*selector, world.block(199, 1), geometry, &work);
  EXPECT_EQ(found[0], far_set({}, 174, 184));
  EXPECT_EQ(work.bytes, 10 * 4);
}

TEST(SnapKv, ShortTextsKeepEverything) {
  ThreadPool pool(1);
  for (const std::int64_t tokens : {0, 1, 20, 60}) {
    World world({.kv_heads = 1, .group = 1, .d = 32, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    if (tokens > 0) world.write(tokens);
    const auto selector = make("snapkv", geometry);
    tell(*selector, world, tokens);
    selector->build(0, world.store().layer(0));
    world.write(40);
    const auto at = static_cast<Position>(world.tokens() - 1);
    EXPECT_EQ(std::ssize(select(*selector, world.block(at, 1), geometry)[0]), world.tokens() - 17);
  }
}

/// A key of which queries have scores of +inf, -inf or NaN, by how they stand to it.
void plant_infinite_key(World& world) {
  world.shape_key = [](Position p, int, int i, float x) {
    return p == 40 && i == 3 ? std::numeric_limits<float>::infinity() : x;
  };
}

// As in attention, where such a key leaves no weight to others.
TEST(SnapKv, QueriesVoteForKeysOfInfiniteScores) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {3, 20}});
  plant_infinite_key(world);
  const LayerGeometry geometry = world.geometry(pool);
  world.write(150);
  const auto selector =
      make("snapkv:window_size=40,max_capacity_prompt=50,kernel_size=1,per=kv-head", geometry);
  tell(*selector, world, 150, 37);
  selector->build(0, world.store().layer(0));
  for (const FarSet& far : select(*selector, world.block(149, 1), geometry))
    EXPECT_EQ(far.count({40, 0.0f}), 1u);
}

TEST(SnapKv, BadKeysAreRefused) {
  for (const char* spec : {"snapkv:kernel_size=4", "snapkv:window_size=320", "snapkv:max_capacity_prompt=64",
                           "snapkv:pooling=sum", "snapkv:window_size=0"})
    expect_refused("snapkv", [&] { parse_spec(spec); });
}

/// The paper's algorithm, keys dropped one by one, for one KV head.
struct DroppedOneByOne {
  std::int64_t heavy, recent;
  Position sink;
  std::vector<double> score;
  std::vector<Position> kept;
  Position border;

  /// Lets keys below `to` compete, one after the other.
  void advance(Position to) {
    for (; border < to; ++border) {
      kept.push_back(border);
      if (std::ssize(kept) <= heavy) continue;
      kept.erase(std::min_element(kept.begin(), kept.end(), [&](Position a, Position b) {
        return std::pair(score[static_cast<std::size_t>(a)], a) <
               std::pair(score[static_cast<std::size_t>(b)], b);
      }));
    }
  }
};

class H2oTest : public testing::Test {
 protected:
  static constexpr std::int64_t kContext = 160;
  H2oTest()
      : world_({.kv_heads = 2, .group = 2, .d = 32, .dense = {2, 10}}), geometry_(world_.geometry(pool_)) {
    world_.write(kContext);
  }
  std::unique_ptr<Selector> built(const std::string& spec, std::int64_t chunk = 100) {
    auto selector = make(spec, geometry_);
    tell(*selector, world_, kContext, chunk);
    KvLayer context = world_.store().layer(0);
    std::vector<KvRows> heads(context.heads.begin(), context.heads.end());
    for (KvRows& head : heads) head.rows = kContext;
    selector->build(0, {.heads = heads, .tokens = kContext});
    return selector;
  }
  std::vector<double> context_scores(int kv_head) {
    std::vector<double> sum(1000, 0.0);
    const QueryBlock block = world_.block(0, kContext);
    for (std::int64_t t = 0; t < kContext; ++t) {
      for (int g = 0; g < 2; ++g) {
        const std::vector<double> w =
            weights(world_, geometry_, block.q.data() + (t * 4 + kv_head * 2 + g) * 32, kv_head, t + 1, true);
        for (std::size_t k = 0; k < w.size(); ++k) sum[k] += w[k];
      }
    }
    return sum;
  }
  /// One step of the engine: chooses, attends, lets the selector observe. Returns what was chosen and gained.
  std::vector<FarSet> step(Selector& selector, Position begin, std::int64_t count, Phase phase,
                           std::vector<std::vector<double>>* gained = nullptr) {
    QueryBlock block = world_.block(begin, count);
    block.phase = phase;
    const Selection chosen = selection_of(selector, block, geometry_);
    std::vector<float> output(block.q.size());
    float* const place = output.data();
    attend({&block, 1}, chosen, geometry_, {&place, 1}, [&](const AttentionMass& mass) {
      selector.observe(mass);
      for (std::size_t i = 0; i < mass.rows.size() && gained != nullptr; ++i)
        (*gained)[static_cast<std::size_t>(mass.kv_head)][static_cast<std::size_t>(mass.rows[i])] +=
            mass.mass[i];
    });
    return far_sets(chosen, block, geometry_);
  }

  ThreadPool pool_{2};
  World world_;
  LayerGeometry geometry_;
};

TEST_F(H2oTest, KeepsWhatDroppingOneByOneKeeps) {
  const auto selector = built("h2o:heavy_ratio=12,recent_ratio=25");
  std::vector<DroppedOneByOne> plain;
  for (int head = 0; head < 2; ++head)
    plain.push_back(
        {.heavy = 12, .recent = 25, .sink = 2, .score = context_scores(head), .kept = {}, .border = 2});
  for (int token = 0; token < 60; ++token) {
    world_.write(1);
    const auto p = static_cast<Position>(kContext + token);
    std::vector<std::vector<double>> gained(2, std::vector<double>(1000, 0.0));
    const std::vector<FarSet> found = step(*selector, p, 1, Phase::generation, &gained);
    for (int head = 0; head < 2; ++head) {
      DroppedOneByOne& own = plain[static_cast<std::size_t>(head)];
      const Position recent = p + 1 - 25;
      own.advance(recent);
      EXPECT_EQ(found[static_cast<std::size_t>(head * 2)], far_set(own.kept, recent, p + 1 - 10)) << token;
      for (std::size_t k = 0; k < own.score.size(); ++k)
        own.score[k] += gained[static_cast<std::size_t>(head)][k];
    }
  }
}

TEST_F(H2oTest, WhatAKnownPromptGivesToAllKeysCounts) {
  const auto selector = built("h2o:heavy_ratio=12,recent_ratio=25");
  world_.write(20);
  const std::vector<FarSet> by_text = step(*selector, 179, 1, Phase::generation);
  selector->roll_back(0, kContext);
  const PromptBehind rows(world_, kContext);
  Branches& branches = *prompt_chooser(selector.get());
  branches.branch(7);
  tell_prompt(*selector, world_, 7, kContext, 20);
  branches.choose_by_prompt(7, rows.kv, rows.tail);
  std::vector<FarSet> expected;
  const QueryBlock asked = world_.block(kContext, 20);
  const std::vector<float> q(asked.q.begin(), asked.q.end());
  for (int head = 0; head < 2; ++head) {
    std::vector<double> score = context_scores(head);
    for (int t = 0; t < 20; ++t)
      for (int g = 0; g < 2; ++g) {
        const auto w =
            weights(world_, geometry_, q.data() + (t * 4 + head * 2 + g) * 32, head, kContext + t + 1, true);
        for (std::size_t k = 0; k < w.size(); ++k) score[k] += w[k];
      }
    for (int g = 0; g < 2; ++g) expected.push_back(far_set(best(score, 12, 2, 155), 155, 170));
  }
  QueryBlock asking = world_.block(179, 1);
  asking.sequence = 7;
  EXPECT_EQ(select(*selector, asking, geometry_), expected);
  EXPECT_NE(expected, by_text);
  EXPECT_EQ(select(*selector, world_.block(179, 1), geometry_), by_text) << "another sequence's";
  selector->roll_back(7, kContext);
  EXPECT_EQ(select(*selector, asking, geometry_), by_text) << "of a prompt that is gone";
}

TEST_F(H2oTest, SharesAreOfTheContextAndStay) {
  const auto selector = built("h2o:heavy_ratio=10%,recent_ratio=5%");
  world_.write(200);
  for (const Position p : {160, 250, 359}) {
    const std::vector<FarSet> found = step(*selector, p, 1, Phase::generation);
    for (const FarSet& set : found) EXPECT_EQ(set.size(), 16u);  // of 5 %, 8 keys, the window holds all
    SelectWork work = selector->take_work();
    EXPECT_GT(work.bytes, 0);
  }
}

TEST_F(H2oTest, ChunksDoNotMatter) {
  const auto whole = built("h2o:heavy_ratio=12,recent_ratio=12", 160),
             pieces = built("h2o:heavy_ratio=12,recent_ratio=12", 7);
  world_.write(60);
  std::vector<FarSet> expected = step(*whole, 160, 40, Phase::question), found;
  for (Position p = 160; p < 200; p += 8) {
    for (FarSet& set : step(*pieces, p, 8, Phase::question)) found.push_back(std::move(set));
  }
  EXPECT_EQ(found, expected);
  for (Position p = 200; p < 220; ++p)
    EXPECT_EQ(step(*whole, p, 1, Phase::generation), step(*pieces, p, 1, Phase::generation)) << p;
}

TEST_F(H2oTest, RollingBackForgetsWhatWasGained) {
  const auto lived = built("h2o:heavy_ratio=12,recent_ratio=12"),
             fresh = built("h2o:heavy_ratio=12,recent_ratio=12");
  world_.write(80);
  for (int question = 0; question < 3; ++question) {
    step(*lived, 160, 20 + question, Phase::question);
    for (Position p = 180; p < 240; ++p) step(*lived, p + 0, 1, Phase::generation);
    lived->roll_back(0, kContext);
  }
  EXPECT_EQ(step(*lived, 160, 30, Phase::question), step(*fresh, 160, 30, Phase::question));
  for (Position p = 190; p < 210; ++p) {
    lived->roll_back(0, p);  // of nothing
    EXPECT_EQ(step(*lived, p, 1, Phase::generation), step(*fresh, p, 1, Phase::generation)) << p;
  }
}

TEST_F(H2oTest, RollingBackAQuestionKeepsWhatWasGainedBeforeIt) {
  const auto lived = built("h2o:heavy_ratio=12,recent_ratio=12"),
             fresh = built("h2o:heavy_ratio=12,recent_ratio=12");
  // Long keys are loved by many.
  world_.shape_key = [](Position, int, int, float x) { return 3.0f * x; };
  world_.write(140);
  for (Selector* selector : {lived.get(), fresh.get()}) {
    step(*selector, 160, 10, Phase::question);
    for (Position p = 170; p < 200; ++p) step(*selector, p, 1, Phase::generation);
  }
  for (int again = 0; again < 2; ++again) {
    for (Position p = 200; p < 230; p += 10) step(*lived, p, 10, Phase::question);
    for (Position p = 230; p < 250 + again; ++p) step(*lived, p, 1, Phase::generation);
    lived->roll_back(0, 200);
  }
  for (Position p = 200; p < 220; p += 5)
    EXPECT_EQ(step(*lived, p, 5, Phase::question), step(*fresh, p, 5, Phase::question)) << p;
  for (Position p = 220; p < 250; ++p)
    EXPECT_EQ(step(*lived, p, 1, Phase::generation), step(*fresh, p, 1, Phase::generation)) << p;
  // Into the first answer: all that was gained since the context ended goes.
  const auto none = built("h2o:heavy_ratio=12,recent_ratio=12");
  lived->roll_back(0, 180);
  EXPECT_EQ(step(*lived, 180, 1, Phase::generation), step(*none, 180, 1, Phase::generation));
}

TEST_F(H2oTest, KeysOfInfiniteScoresAreHeavy) {
  world_.store().roll_back(0);
  plant_infinite_key(world_);
  world_.write(kContext);
  const auto selector = built("h2o:heavy_ratio=12,recent_ratio=12");
  world_.write(1);
  for (const FarSet& far : step(*selector, kContext, 1, Phase::generation))
    EXPECT_EQ(far.count({40, 0.0f}), 1u);
}

// A sample of the queries finds most of what all of them find.
TEST_F(H2oTest, ASampleOfQueriesComesClose) {
  const auto all = built("h2o:heavy_ratio=20,recent_ratio=1"),
             some = built("h2o:heavy_ratio=20,recent_ratio=1,queries=90");
  world_.write(1);
  const std::vector<FarSet> expected = step(*all, 160, 1, Phase::generation),
                            found = step(*some, 160, 1, Phase::generation);
  for (std::size_t h = 0; h < 4; ++h) {
    std::size_t both = 0;
    for (const auto& key : found[h]) both += expected[h].count(key);
    EXPECT_EQ(found[h].size(), 20u);
    EXPECT_GE(both, 13u);
  }
}

TEST_F(H2oTest, SavedScoresServe) {
  const auto saved = built("h2o:heavy_ratio=12,recent_ratio=12"),
             loaded = make("h2o:heavy_ratio=12,recent_ratio=12", geometry_);
  load_sections(*loaded, saved_sections(*saved), world_.store().layer(0));
  world_.write(20);
  EXPECT_EQ(step(*saved, 160, 20, Phase::question), step(*loaded, 160, 20, Phase::question));
}

TEST_F(H2oTest, DamagedScoresAreRefused) {
  const auto selector = built("h2o");
  const IndexSections good = saved_sections(*selector);
  const DamagedIndex refused(*selector, good, world_.store().layer(0));
  refused("KV heads", "shape", 0, number(1));
  refused("within the context", "shape", 8, number(-2));
  refused("within the context", "shape", 8, number(std::int64_t{1} << 40));
  refused("within the context", "shape", 16, number(161));
  refused("within the context", "shape", 16, number(-1));
  refused("size that 'shape' gives", "shape", 16, number(3));
  refused("finite", "scores", 8, std::string("\x00\x00\xc0\x7f", 4));
  refused("not negative", "scores", 8, std::string("\x00\x00\x80\xbf", 4));
}

}  // namespace
}  // namespace lode::test
