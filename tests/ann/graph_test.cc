// SPDX-License-Identifier: Apache-2.0
// Exact nearest keys, the graph over keys and the walk on it: what brute force finds, every node reachable
// whatever is added and taken away, the same for any number of threads, and nothing that input can break.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "ann/graph/beam_choice.h"
#include "ann/graph/beam_search.h"
#include "ann/graph/build.h"
#include "ann/graph/key_space.h"
#include "ann/graph/ranked_walk.h"
#include "ann/nearest.h"
#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {
namespace {

constexpr std::int64_t kDim = 32;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

Matrix<const float> matrix(const std::vector<float>& x) {
  return {x.data(), std::ssize(x) / kDim, kDim};
}

/// Keys in groups, and queries far away from all of them that each want the keys of some groups.
struct World {
  explicit World(std::int64_t keys_wanted, std::int64_t queries_wanted, std::uint64_t seed = 1) {
    Rng rng(seed);
    std::vector<float> centres(40 * kDim);
    for (float& c : centres) c = static_cast<float>(rng.normal());
    const auto near = [&](float offset, float noise, std::vector<float>& out) {
      const auto group = static_cast<std::int64_t>(rng.below(40)) * kDim;
      for (std::int64_t j = 0; j < kDim; ++j)
        out.push_back(centres[static_cast<std::size_t>(group + j)] +
                      noise * static_cast<float>(rng.normal()) + offset);
    };
    for (std::int64_t i = 0; i < keys_wanted; ++i) near(2.0f, 0.7f, keys);
    for (std::int64_t i = 0; i < queries_wanted; ++i) near(-1.0f, 0.7f, queries);
    for (std::int64_t i = 0; i < 60; ++i) near(-1.0f, 0.7f, asked);
  }
  std::vector<float> keys, queries, asked;  // [n, d], [q, d], [60, d]: not among the queries
};

QuantizedKeys coded(const std::vector<float>& keys) {
  QuantizedKeys out(static_cast<int>(kDim));
  out.resize(std::ssize(keys) / kDim);
  for (std::int64_t i = 0; i < out.size(); ++i) out.put(i, matrix(keys)[i]);
  return out;
}

/// Nodes that links lead to from the root.
std::int64_t reached(const KeyGraph& graph) {
  if (graph.nodes() == 0) return 0;
  std::vector<bool> seen(static_cast<std::size_t>(graph.nodes()), false);
  std::vector<Node> queue = {graph.entries()[0]};
  seen[static_cast<std::size_t>(queue[0])] = true;
  for (std::size_t i = 0; i < queue.size(); ++i) {
    for (const Link link : graph.links(queue[i])) {
      const auto target = static_cast<std::size_t>(target_of(link));
      if (!seen.at(target)) queue.push_back(target_of(link));
      seen[target] = true;
    }
  }
  return std::ssize(queue);
}

/// Mean share of the 10 best keys of world.asked that walks with this beam find, and keys scored a walk.
std::pair<double, double> recall(const KeyGraph& graph, const QuantizedKeys& keys, const World& world,
                                 std::int64_t beam, ThreadPool& pool) {
  const auto nodes = graph.nodes();
  const auto exact = nearest_keys(matrix(world.asked), {world.keys.data(), nodes, kDim}, 10, pool);
  BeamSearch walk;
  double found = 0, scored = 0;
  for (std::int64_t q = 0; q < 60; ++q) {
    walk.begin(graph, keys.view(), matrix(world.asked)[q].data(), std::max<std::int64_t>(beam, 16));
    walk.visit(graph.entries());
    walk.run(beam);
    std::vector<Node> nodes_found;
    for (std::int64_t rank = 0; rank < walk.found(); ++rank) nodes_found.push_back(walk.node(rank));
    for (std::int64_t i = 0; i < 10; ++i)
      found += std::find(nodes_found.begin(), nodes_found.end(),
                         exact[static_cast<std::size_t>(q * 10 + i)]) != nodes_found.end();
    scored += static_cast<double>(walk.scored());
  }
  return {found / 600, scored / 60};
}

/// Links the next node to its nearest keys, as a selector would.
void add_next(KeyGraph& graph, const QuantizedKeys& keys, const World& world) {
  BeamSearch walk;
  walk.begin(graph, keys.view(), matrix(world.keys)[graph.nodes()].data(), 32);
  walk.visit(graph.entries());
  walk.run(16);
  std::vector<Node> near;
  for (std::int64_t rank = 0; rank < walk.found(); ++rank) near.push_back(walk.node(rank));
  sort_by_distance(static_cast<Node>(graph.nodes()), near, keys.view());
  near.resize(std::min<std::size_t>(near.size(), 6));
  graph.add(near, {}, keys.view(), [&](Node node) { return keys.view().squares[node]; });
}

TEST(NearestKeys, AreThoseOfAPlainSearch) {
  ThreadPool pool(2);
  World world(3000, 70);
  world.keys[5 * kDim] = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t k : {1, 7, 64}) {
    const auto found = nearest_keys(matrix(world.queries), matrix(world.keys), k, pool);
    for (std::int64_t q = 0; q < 70; ++q) {
      std::vector<std::pair<double, std::int32_t>> scores;
      for (std::int64_t i = 0; i < 3000; ++i) {
        double s = 0;
        for (std::int64_t j = 0; j < kDim; ++j)
          s += static_cast<double>(matrix(world.queries)[q][static_cast<std::size_t>(j)]) *
               matrix(world.keys)[i][static_cast<std::size_t>(j)];
        scores.emplace_back(std::isnan(s) ? INFINITY : -s, static_cast<std::int32_t>(i));
      }
      std::sort(scores.begin(), scores.end());
      std::vector<std::int32_t> expected, own(found.begin() + q * k, found.begin() + (q + 1) * k);
      for (std::int64_t i = 0; i < k; ++i) expected.push_back(scores[static_cast<std::size_t>(i)].second);
      EXPECT_EQ(own, expected) << q;
    }
  }
}

TEST(NearestKeys, EqualOnesComeByRisingIndexAndFewKeysAreAllGiven) {
  ThreadPool pool(1);
  const std::vector<float> keys(5 * kDim, 1.0f), query(kDim, 1.0f);
  EXPECT_EQ(nearest_keys(matrix(query), matrix(keys), 3, pool), (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(nearest_keys(matrix(query), matrix(keys), 100, pool), (std::vector<std::int32_t>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(nearest_keys(matrix(query), matrix({}), 3, pool).empty());
}

// Streams that a running selection may lose count of: all alike, ever better, ever worse, hardly a number,
// over several blocks of keys.
TEST(NearestKeys, OfHostileStreamsAreThoseOfASort) {
  ThreadPool pool(2);
  constexpr std::int64_t kCount = 9000, kBest = 64;
  const auto key = [](int kind, std::int64_t i) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    const auto place = static_cast<float>(i);
    if (kind == 0) return 1.0f;
    if (kind == 1) return place;
    if (kind == 2) return -place;
    if (kind == 3) return i % 200 == 7 ? -place : kNan;             // 45 numbers: fewer than are wanted
    if (kind == 4) return i > 5000 && i % 40 == 1 ? -place : kNan;  // none among the first
    return static_cast<float>(i * 7919 % 97);                       // many equal ones
  };
  const std::vector<float> query = {1.0f};
  for (int kind = 0; kind < 6; ++kind) {
    std::vector<float> keys;
    for (std::int64_t i = 0; i < kCount; ++i) keys.push_back(key(kind, i));
    std::vector<std::int32_t> order(kCount);
    std::iota(order.begin(), order.end(), 0);
    const auto lowest = -std::numeric_limits<float>::infinity();
    const auto score = [&](std::int32_t i) { return std::isnan(keys[at(i)]) ? lowest : keys[at(i)]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return score(a) > score(b); });
    order.resize(kBest);
    EXPECT_EQ(nearest_keys({query.data(), 1, 1}, {keys.data(), kCount, 1}, kBest, pool), order) << kind;
  }
}

// Queries out of the keys' distribution: the graph made of queries finds their keys; a beam as wide as the
// graph finds all, since every node is reachable.
TEST(KeyGraph, FindsWhatBruteForceFinds) {
  ThreadPool pool(2);
  const World world(4000, 1500);
  const QuantizedKeys keys = coded(world.keys);
  const KeyGraph graph = build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 16, pool);
  EXPECT_EQ(reached(graph), 4000);
  const auto [found, scored] = recall(graph, keys, world, 48, pool);
  EXPECT_GE(found, 0.95);
  EXPECT_LE(scored, 4000 * 0.2);
  EXPECT_GE(recall(graph, keys, world, 4000, pool).first, 0.999);
}

/// Walks for other queries than those that the links were suited to.
TEST(KeyGraph, TunedScoresFewerKeysAndFindsAsMany) {
  ThreadPool pool(2);
  const World world(6000, 1500);
  const QuantizedKeys keys = coded(world.keys);
  const auto build = [&](bool tune) {
    return build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 16, pool, tune);
  };
  const KeyGraph plain = build(false), tuned = build(true);
  EXPECT_EQ(reached(tuned), 6000);
  const auto before = recall(plain, keys, world, 24, pool), after = recall(tuned, keys, world, 32, pool);
  EXPECT_GE(after.first, before.first - 0.01) << before.first;
  EXPECT_LT(after.second, before.second) << before.second;
}

// The beam that is chosen finds what was asked for, of queries that took no part either; more recall takes a
// wider one, and what no beam reaches the widest.
TEST(BeamChoice, ReachesTheRecallForOtherQueries) {
  ThreadPool pool(2);
  constexpr std::int64_t kTold = 1500, kJudges = 400;
  const World world(6000, kTold + kJudges);
  const QuantizedKeys keys = coded(world.keys);
  const float* const judges = world.queries.data() + kTold * kDim;
  const KeyGraph graph =
      build_graph(matrix(world.keys), {world.queries.data(), kTold, kDim}, keys.view(), 16, pool);
  const std::vector<Node> nearest = nearest_keys({judges, kJudges, kDim}, matrix(world.keys), 10, pool);
  const auto choose = [&](double share, std::int64_t most) {
    return choose_beam(graph, {{judges, kJudges, kDim}, nearest}, share, most, keys.view(), pool);
  };
  std::int64_t before = 0;
  for (const double share : {0.8, 0.9, 0.95, 0.99}) {
    const std::int64_t beam = choose(share, 6000);
    EXPECT_GE(beam, before);
    EXPECT_GE(recall(graph, keys, world, beam, pool).first, share - 0.02) << beam;
    before = beam;
  }
  EXPECT_GT(before, choose(0.8, 6000));
  EXPECT_EQ(choose(1.5, 300), 300);
}

/// The narrowest of the tried beams with which all walks find the share, as beam_choice.h has it.
std::int64_t beam_by_all_walks(const KeyGraph& graph, const Wanted& wanted, double share, std::int64_t most,
                               const BeamKeys& keys) {
  const std::int64_t each = wanted.each(), count = wanted.queries.rows;
  for (std::int64_t from = 16; from < most; from *= 2) {
    std::vector<BeamSearch> walks(at(count));
    for (std::int64_t q = 0; q < count; ++q) {
      walks[at(q)].begin(graph, keys, wanted.queries[q].data(), std::max(2 * from, 2 * each));
      walks[at(q)].visit(graph.entries());
    }
    for (std::int64_t beam = from; beam < std::min(2 * from, most); beam += from / 8) {
      double sum = 0.0, squares = 0.0;
      for (std::int64_t q = 0; q < count; ++q) {
        walks[at(q)].run(beam);
        const std::span<const Node> own = wanted.nearest.subspan(at(q * each), at(each));
        double hits = 0.0;
        for (std::int64_t rank = 0; rank < std::min(2 * each, walks[at(q)].found()); ++rank)
          hits += std::ranges::find(own, walks[at(q)].node(rank)) != own.end() ? 1.0 : 0.0;
        sum += hits / static_cast<double>(each);
        squares += hits * hits / static_cast<double>(each * each);
      }
      const double n = static_cast<double>(count), mean = sum / n;
      if (mean - std::sqrt(std::max(0.0, squares / n - mean * mean) / n) >= share) return beam;
    }
  }
  return most;
}

// Neither stopping early nor the other kind of walk changes the choice, where queries have structure and where they
// have none.
TEST(BeamChoice, IsThatOfAllWalks) {
  constexpr std::int64_t kTold = 1000, kJudges = 60, kWanted = 20;
  World world(3000, kTold + kJudges);
  std::set<std::int64_t> chosen;
  for (const bool structured : {true, false}) {
    Rng rng(3);
    for (std::vector<float>* const rows : {&world.keys, &world.queries})
      for (float& x : *rows)
        if (!structured) x = static_cast<float>(rng.normal());
    const QuantizedKeys keys = coded(world.keys);
    const float* const judges = world.queries.data() + kTold * kDim;
    ThreadPool pool(2);
    const KeyGraph graph =
        build_graph(matrix(world.keys), {world.queries.data(), kTold, kDim}, keys.view(), 12, pool);
    const auto nearest = nearest_keys({judges, kJudges, kDim}, matrix(world.keys), kWanted, pool);
    const Wanted wanted = {{judges, kJudges, kDim}, nearest};
    ThreadPool one(1), three(3);
    for (const double share :
         {0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0, 1.1}) {
      for (const std::int64_t most : {10, 187, 3000}) {
        const std::int64_t beam = beam_by_all_walks(graph, wanted, share, most, keys.view());
        for (ThreadPool* const threads : {&one, &three})
          EXPECT_EQ(choose_beam(graph, wanted, share, most, keys.view(), *threads), beam)
              << share << " " << most;
        if (beam < most) chosen.insert(beam);
      }
    }
  }
  EXPECT_GE(chosen.size(), 15u);  // narrow ones and wide ones
  EXPECT_LT(*chosen.begin(), 3000 / 64);
}

// Also of keys and queries that are no numbers, and of equal scores.
TEST(RankedWalk, FindsWhatBeamSearchFinds) {
  ThreadPool pool(2);
  World world(1500, 500);
  std::fill_n(world.keys.begin() + 40 * kDim, 30 * kDim, std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t i = 100; i < 400; ++i)
    std::copy_n(world.keys.begin(), kDim, world.keys.begin() + i * kDim);
  std::fill_n(world.asked.begin(), kDim, std::numeric_limits<float>::infinity());
  std::fill_n(world.asked.begin() + kDim, kDim, 0.0f);
  const QuantizedKeys keys = coded(world.keys);
  const KeyGraph graph = build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 8, pool);
  BeamSearch search;
  RankedWalk ranked;
  for (std::int64_t q = 0; q < 60; ++q) {
    search.begin(graph, keys.view(), matrix(world.asked)[q].data(), 1500);
    search.visit(graph.entries());
    ranked.begin(graph, keys.view(), matrix(world.asked)[q].data());
    for (const std::int64_t beam : {1, 2, 17, 64, 65, 200, 1500}) {
      search.run(beam);
      ranked.run(beam);
      std::vector<Node> found, others;
      for (std::int64_t rank = 0; rank < search.found(); ++rank) found.push_back(search.node(rank));
      for (const std::int64_t best : {1, 20, 64, 300, 1500}) {
        const auto count = std::min<std::int64_t>(best, std::ssize(found));
        ASSERT_EQ(ranked.found_of(std::span(found).first(at(count)), best), count) << q << " " << beam;
        ASSERT_EQ(ranked.found_of(std::span(found).subspan(at(count)), best), 0) << q << " " << beam;
      }
      for (Node node = 0; node < 1500; ++node)
        if (std::ranges::find(found, node) == found.end()) others.push_back(node);
      ASSERT_EQ(ranked.found_of(others, 1500), 0) << q << " " << beam;
    }
  }
}

/// Queries that see 20 of 96 directions: walks need no others, and distances are those that queries see.
TEST(KeySpace, HoldsScoresInFewerNumbers) {
  constexpr std::int64_t d = 96, n = 3000, seen = 20;
  Rng rng(4);
  const auto normal = [&] { return static_cast<float>(rng.normal()); };
  std::vector<float> basis(seen * d), keys(n * d), queries(n * d);
  for (float& x : basis) x = normal();
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < d; ++j) keys[at(i * d + j)] = 3.0f + normal();
    for (std::int64_t b = 0; b < seen; ++b) {
      const float weight = normal() / static_cast<float>(1 + b);
      for (std::int64_t j = 0; j < d; ++j) queries[at(i * d + j)] += weight * basis[at(b * d + j)];
    }
  }
  const Matrix<const float> k(keys.data(), n, d), q(queries.data(), n, d);
  const KeySpace space = KeySpace::of(q, k);
  EXPECT_EQ(space.numbers(), 60);  // one cache line beside the scale
  const auto m = at(space.numbers());
  double error = 0, all = 0, far = 0, expected = 0;
  std::vector<float> towards(m), own(m), other(m);
  for (std::int64_t i = 0; i < 200; ++i) {
    space.query(q[i].data(), towards);
    space.key(k[i].data(), own);
    space.key(k[i + 200].data(), other);
    double exact = 0, short_of = 0;  // of a difference of keys, which the mean has left
    for (std::size_t j = 0; j < at(d); ++j) exact += double{q[i][j]} * (k[i][j] - k[i + 200][j]);
    for (std::size_t j = 0; j < m; ++j) {
      short_of += double{towards[j]} * (own[j] - other[j]);
      far += (double{own[j]} - other[j]) * (own[j] - other[j]);
    }
    error += (exact - short_of) * (exact - short_of);
    all += exact * exact;
    for (std::int64_t a = 0; a < n; ++a) {
      double product = 0;
      for (std::size_t j = 0; j < at(d); ++j) product += double{q[a][j]} * (k[i][j] - k[i + 200][j]);
      expected += product * product / static_cast<double>(n);
    }
  }
  EXPECT_LT(error, 0.01 * all);
  double trace = 0;  // distances are in units of the queries' mean square
  for (const float x : queries) trace += double{x} * x / static_cast<double>(n * d);
  EXPECT_NEAR(far * trace / expected, 1.0, 0.1);
  const KeySpace again = KeySpace::restore(d, space.numbers(), space.values());
  again.key(k[5].data(), own);
  space.key(k[5].data(), other);
  EXPECT_EQ(own, other);
}

/// One key 1e9 times as long as the others, and one such query, in directions where nothing else differs.
TEST(KeySpace, AreNotBentByAFewHugeVectors) {
  constexpr std::int64_t d = 128, n = 2000, seen = 48;
  Rng rng(6);
  std::vector<float> keys(n * d), queries(n * d);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < d; ++j) {
      keys[at(i * d + j)] = 1.0f + (j < seen ? 1.0f : 0.02f) * static_cast<float>(rng.normal());
      queries[at(i * d + j)] = static_cast<float>(rng.normal());
    }
  }
  const Matrix<const float> k(keys.data(), n, d), q(queries.data(), n, d);
  const auto error = [&](const KeySpace& space) {  // of differences of scores, as a share of their variance
    const auto m = at(space.numbers());
    std::vector<float> towards(m), own(m), other(m);
    double lost = 0, all = 0;
    for (std::int64_t i = 10; i < 500; ++i) {
      space.query(q[i].data(), towards);
      space.key(k[i].data(), own);
      space.key(k[i + 500].data(), other);
      double exact = 0, kept = 0;
      for (std::size_t j = 0; j < at(d); ++j) exact += double{q[i][j]} * (k[i][j] - k[i + 500][j]);
      for (std::size_t j = 0; j < m; ++j) kept += double{towards[j]} * (own[j] - other[j]);
      lost += (exact - kept) * (exact - kept);
      all += exact * exact;
    }
    return lost / all;
  };
  const KeySpace plain = KeySpace::of(q, k);
  EXPECT_EQ(plain.numbers(), 60);
  EXPECT_LT(error(plain), 0.01);
  for (std::int64_t j = 0; j < d; ++j) {
    keys[at(j)] = j >= seen ? 1e9f : 0.0f;
    queries[at(d + j)] = j < seen / 2 ? -1e9f : 0.0f;
  }
  const KeySpace robust = KeySpace::of(q, k);
  EXPECT_EQ(robust.numbers(), 60);
  EXPECT_LT(error(robust), 0.02);
}

TEST(KeySpace, KeepsAllThatQueriesSee) {
  constexpr std::int64_t d = 128, n = 2000;
  Rng rng(5);
  std::vector<float> keys(n * d);
  for (float& x : keys) x = static_cast<float>(rng.normal());
  EXPECT_GE(KeySpace::of({keys.data(), n, d}, {keys.data(), n, d}).numbers(), 124);
  for (float& x : keys) x = std::numeric_limits<float>::quiet_NaN();
  const KeySpace none = KeySpace::of({keys.data(), n, d}, {keys.data(), n, d});
  std::vector<float> out(at(none.numbers()));
  none.query(std::vector<float>(d, 1.0f).data(), out);
  for (const float x : out) EXPECT_TRUE(std::isfinite(x));
}

TEST(KeyGraph, IsTheSameForAnyNumberOfThreads) {
  const World world(2000, 500);
  const QuantizedKeys keys = coded(world.keys);
  std::vector<std::vector<Link>> rows;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const KeyGraph graph = build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 12, pool);
    rows.emplace_back(graph.rows().begin(), graph.rows().end());
  }
  EXPECT_EQ(rows[0], rows[1]);
}

TEST(KeyGraph, ReachesEveryKeyWhateverTheyAre) {
  ThreadPool pool(2);
  const float huge = 1e37f;
  const std::vector<std::function<float(std::int64_t, float)>> shapes = {
      [](std::int64_t, float) { return 1.0f; },                            // all equal
      [](std::int64_t, float) { return 0.0f; },                            // all nothing
      [](std::int64_t i, float x) { return i < 900 ? 0.0f : x; },          // most nothing
      [=](std::int64_t i, float x) { return i % 3 == 0 ? x * huge : x; },  // norms that overflow
      [](std::int64_t i, float x) { return x * std::pow(10.0f, static_cast<float>(i % 9 - 4)); },
      [](std::int64_t, float x) { return x * 1e-40f; },  // subnormal
  };
  for (std::size_t shape = 0; shape < shapes.size(); ++shape) {
    for (const std::int64_t count : {0, 1, 2, 5, 1000}) {
      World world(count, 64);
      for (std::int64_t i = 0; i < std::ssize(world.keys); ++i)
        world.keys[static_cast<std::size_t>(i)] =
            shapes[shape](i / kDim, world.keys[static_cast<std::size_t>(i)]);
      const QuantizedKeys keys = coded(world.keys);
      for (const int degree : {4, 24}) {
        for (const bool with_queries : {true, false}) {
          const std::vector<float> queries =
              with_queries ? world.queries : stand_in_queries(matrix(world.keys));
          KeyGraph graph = build_graph(matrix(world.keys), matrix(queries), keys.view(), degree, pool);
          EXPECT_EQ(reached(graph), count) << shape;
          graph.cut(count / 2, keys.view(), pool);
          EXPECT_EQ(reached(graph), count / 2) << shape;
        }
      }
    }
  }
}

// Random additions and cuts, also below what was built: all nodes stay reachable, and undoing gives back the
// very links.
TEST(KeyGraph, StaysWholeThroughChanges) {
  ThreadPool pool(2);
  const World world(700, 200);
  const QuantizedKeys keys = coded(world.keys);
  for (const std::int64_t built : {0, 1, 300}) {
    KeyGraph graph =
        build_graph({world.keys.data(), built, kDim}, matrix(world.queries), keys.view(), 6, pool);
    Rng rng(static_cast<std::uint64_t>(built));
    for (int step = 0; step < 40; ++step) {
      const auto some = static_cast<std::int64_t>(rng.below(30));
      const std::vector<Link> before(graph.rows().begin(), graph.rows().end());
      const std::int64_t nodes = graph.nodes();
      for (std::int64_t i = 0; i < some && graph.nodes() < 700; ++i) add_next(graph, keys, world);
      ASSERT_EQ(reached(graph), graph.nodes());
      if (rng.below(3) == 0) {
        graph.undo(nodes);
        ASSERT_EQ(std::vector<Link>(graph.rows().begin(), graph.rows().end()), before);
      }
      if (rng.below(8) == 0) {
        graph.cut(static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(graph.nodes() + 1))),
                  keys.view(), pool);
        ASSERT_EQ(reached(graph), graph.nodes());
      }
      const KeyGraph again = KeyGraph::restore(6, graph.rows(), graph.entries(), "graph");
      ASSERT_EQ(again.settled(), graph.nodes());
    }
  }
}

// Keys that fill their parents' rows with tree links alone.
TEST(KeyGraph, HangsMoreChildrenThanARowHolds) {
  const std::vector<float> same(3000 * kDim, 1.0f);
  const QuantizedKeys keys = coded(same);
  KeyGraph graph(4);
  const std::vector<Node> first = {0};
  for (int i = 0; i < 3000; ++i)
    graph.add(graph.nodes() == 0 ? std::span<const Node>() : std::span<const Node>(first), {}, keys.view(),
              [](Node) { return 0.0f; });
  EXPECT_EQ(reached(graph), 3000);
}

TEST(KeyGraph, RefusesLinksThatAreNoGraph) {
  ThreadPool pool(1);
  const World world(50, 20);
  const QuantizedKeys keys = coded(world.keys);
  const KeyGraph graph = build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 6, pool);
  const std::vector<Link> good(graph.rows().begin(), graph.rows().end());
  const std::vector<Node> entries(graph.entries().begin(), graph.entries().end());
  const auto refused = [&](const std::function<void(std::vector<Link>&, std::vector<Node>&)>& damage) {
    std::vector<Link> rows = good;
    std::vector<Node> from = entries;
    damage(rows, from);
    EXPECT_THROW(KeyGraph::restore(6, rows, from, "graph"), InputError);
  };
  const auto tree = static_cast<std::size_t>(
      std::find_if(good.begin(), good.end(), [](Link l) { return (l & kTreeLink) != 0; }) - good.begin());
  refused([](auto& rows, auto&) { rows.pop_back(); });
  refused([](auto& rows, auto&) { rows[0] = 50; });
  refused([](auto& rows, auto&) { rows[0] = 0; });  // to itself
  refused([](auto& rows, auto&) { rows[0] = ~Link{0}; });
  refused([&](auto& rows, auto&) { rows[tree] &= ~kTreeLink; });
  refused([&](auto& rows, auto&) { rows[tree] = kNoLink; });
  refused([](auto&, auto& from) { from.clear(); });
  refused([](auto&, auto& from) { from[0] = -1; });
  refused([](auto&, auto& from) { from[0] = 50; });
  refused([](auto&, auto& from) { std::swap(from[0], from[1]); });
  refused([](auto&, auto& from) { from.resize(17, from[0]); });
}

TEST(BeamSearch, ReturnsWhatItDroppedWhenItIsWidened) {
  ThreadPool pool(1);
  const World world(1000, 300);
  const QuantizedKeys keys = coded(world.keys);
  const KeyGraph graph = build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 12, pool);
  BeamSearch narrow, wide;
  for (std::int64_t q = 0; q < 60; ++q) {
    const float* const query = matrix(world.asked)[q].data();
    narrow.begin(graph, keys.view(), query, 8, /*may_widen=*/true);
    narrow.visit(graph.entries());
    narrow.visit(graph.entries());
    narrow.run(8);
    EXPECT_LE(narrow.found(), 8);
    narrow.widen(1000);
    narrow.run(1000);
    wide.begin(graph, keys.view(), query, 1000);
    wide.visit(graph.entries());
    wide.run(1000);
    ASSERT_EQ(narrow.found(), 1000);
    ASSERT_EQ(wide.found(), 1000);
    for (std::int64_t rank = 0; rank < 1000; ++rank) ASSERT_EQ(narrow.node(rank), wide.node(rank));
  }
}

TEST(KeyGraph, BuildingCanBeInterrupted) {
  ThreadPool pool(2);
  const World world(500, 100);
  const QuantizedKeys keys = coded(world.keys);
  set_cancel(true);
  EXPECT_THROW(build_graph(matrix(world.keys), matrix(world.queries), keys.view(), 8, pool), Interrupted);
  set_cancel(false);
}

}  // namespace
}  // namespace lode
