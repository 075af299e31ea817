// SPDX-License-Identifier: Apache-2.0
// Squeezed Attention: every key in one cluster, the lookup of equations 1 to 3 against double precision,
// thresholds that hold what they promise, growth, and what a damaged file must not do.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/shares_index.h"
#include "select/shared/threshold_selector.h"
#include "select/squeezed/cluster_choice.h"
#include "select/squeezed/cluster_tree.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr std::int64_t kContext = 600;

/// Writes tokens to the world and tells the selector.
void write(World& world, Selector& selector, std::int64_t count, Phase phase = Phase::context) {
  const auto begin = static_cast<Position>(world.tokens());
  world.write(count);
  tell(selector, world.block(begin, count), phase);
}

void build(World& world, Selector& selector) {
  build_whole("squeezed", selector, world);
}

const Calibration& calibration(const Selector& selector) {
  return *static_cast<const ThresholdSelector&>(selector).calibration(0);
}

/// Of each level, for as many tokens.
std::vector<double> thresholds(const Selector& selector, QueryKind kind, std::int64_t tokens) {
  std::vector<double> out;
  const Thresholds& all = calibration(selector).thresholds;
  for (int level = 0; level < all.levels(); ++level) out.push_back(all.of(kind, tokens, level));
  return out;
}

/// The saved index of a selector.
struct Saved {
  std::vector<ClusterSegment> segments;
  explicit Saved(const Selector& selector, const ClusterShape& shape, std::int64_t tokens) {
    const std::filesystem::path path =
        std::filesystem::path(testing::TempDir()) / ("squeezed-" + std::to_string(getpid()));
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    selector.save(0, sections);
    out.finish();
    const ContainerReader in(path);
    segments = load_segments(shape, tokens, SectionReader(in, "x/"));
    std::filesystem::remove(path);
  }
};

std::vector<double> row_of(const std::vector<std::byte>& rows, DType type, std::int64_t row, int d) {
  std::vector<float> wide(static_cast<std::size_t>(d));
  kernels().widen(rows.data() + row * d * bytes_of(type), type, d, wide.data());
  return {wide.begin(), wide.end()};
}

TEST(ClusterTree, EveryKeyIsInOneClusterAndMeansAreMeans) {
  ThreadPool pool(2);
  for (const DType type : {DType::f32, DType::f16, DType::q8}) {
    World world({.kv_heads = 1, .group = 1, .d = 64, .type = type});
    world.write(300);
    const ClusterTree tree =
        build_cluster_tree(world.store().layer(0).heads[0], 10, 290,
                           {.nodes = {3, 9, 27}, .values = true, .spreads = true, .seed = 5}, pool);
    ASSERT_EQ(tree.levels.size(), 3u);
    std::vector<Position> rows = tree.rows;
    std::sort(rows.begin(), rows.end());
    for (Position p = 10; p < 290; ++p) ASSERT_EQ(rows[static_cast<std::size_t>(p - 10)], p);
    // From each node of each level down to its keys: their number, and the means of keys and values.
    for (std::size_t l = 0; l < 3; ++l) {
      for (std::int32_t node = 0; node < tree.levels[l].nodes(); ++node) {
        std::int32_t begin = node, end = node + 1;
        for (std::size_t below = l; below < 3; ++below) {
          begin = tree.levels[below].first[static_cast<std::size_t>(begin)];
          end = tree.levels[below].first[static_cast<std::size_t>(end)];
        }
        ASSERT_EQ(end - begin, tree.levels[l].keys[static_cast<std::size_t>(node)]);
        ASSERT_GE(end - begin, 1);
        const std::vector<double> k = row_of(tree.levels[l].centroids, tree.type, node, 64),
                                  v = row_of(tree.levels[l].values, tree.type, node, 64),
                                  s = row_of(tree.levels[l].spreads, DType::q8, node, 32);
        const double scale = tree.levels[l].spread_scales[static_cast<std::size_t>(node)];
        std::vector<double> variance(64);
        for (int j = 0; j < 64; ++j) {
          double key = 0, value = 0, square = 0;
          for (std::int32_t i = begin; i < end; ++i) {
            const double own =
                world.key(tree.rows[static_cast<std::size_t>(i)], 0)[static_cast<std::size_t>(j)];
            key += own;
            square += own * own;
            value += world.value(tree.rows[static_cast<std::size_t>(i)], 0)[static_cast<std::size_t>(j)];
          }
          ASSERT_NEAR(k[static_cast<std::size_t>(j)], key / (end - begin), 2e-3);
          ASSERT_NEAR(v[static_cast<std::size_t>(j)], value / (end - begin), 2e-3);
          const double mean = key / (end - begin);
          variance[static_cast<std::size_t>(j)] = square / (end - begin) - mean * mean;
        }
        for (std::size_t j = 0; j < 32; ++j)
          ASSERT_NEAR(s[j] * scale, (variance[j] + variance[j + 32]) / 2.0, 0.51 * scale + 1e-5);
      }
    }
  }
}

/// The keys that equations 1 to 3 keep, in double, over what a selector saved: averaged over the block's
/// tokens and the group's heads. Adds up the nodes that are read: all of the top, and children of kept ones.
std::set<Position> keep_exactly(const std::vector<ClusterSegment>& segments, const QueryBlock& block,
                                const LayerGeometry& g, int head, std::span<const double> thresholds,
                                bool spreads, bool squares, double margin, std::set<Position>* doubtful,
                                std::int64_t& nodes) {
  struct Node {
    const ClusterTree* tree;
    std::int32_t index;
    double score = 0;
  };
  std::vector<Node> frontier;
  double all = 0;
  for (const ClusterSegment& segment : segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    for (std::int32_t i = 0; i < tree.levels[0].nodes(); ++i) frontier.push_back({&tree, i});
    all += segment.end - segment.begin;
  }
  std::set<Position> kept;
  for (std::size_t level = 0; level < thresholds.size(); ++level) {
    const auto keys = [&](const Node& n) {
      return n.tree->levels[level].keys[static_cast<std::size_t>(n.index)];
    };
    nodes += std::ssize(frontier);
    const std::int64_t rows = block.tokens * g.group();
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t query = r / g.group() * g.query_heads + head * g.group() + r % g.group();
      std::vector<double> z;
      for (const Node& n : frontier) {
        const auto c = row_of(n.tree->levels[level].centroids, n.tree->type, n.index, g.head_dim);
        const ClusterLevel& own = n.tree->levels[level];
        const auto v = own.spreads.empty() ? std::vector<double>(c.size())
                                           : row_of(own.spreads, DType::q8, n.index, g.head_dim / 2);
        double mean = 0, variance = 0;
        for (std::size_t i = 0; i < c.size(); ++i) {
          const double q =
              block.q[static_cast<std::size_t>(query * g.head_dim) + i] * static_cast<double>(g.scale);
          mean += q * c[i] * (own.scales.empty() ? 1.0f : own.scales[static_cast<std::size_t>(n.index)]);
          variance += q * q * v[i % v.size()];
        }
        variance *=
            own.spreads.empty() || !spreads ? 0.0f : own.spread_scales[static_cast<std::size_t>(n.index)];
        const double s = std::sqrt(variance), most = std::sqrt(2.0 * std::log(keys(n)));
        z.push_back(mean + (s < most ? s * s / 2.0 : s * most - most * most / 2.0));
      }
      const double peak = *std::max_element(z.begin(), z.end());
      double sum = 0;
      for (std::size_t i = 0; i < z.size(); ++i) sum += keys(frontier[i]) * std::exp(z[i] - peak);
      for (std::size_t i = 0; i < z.size(); ++i)
        frontier[i].score +=
            std::pow(std::exp(z[i] - peak) / sum * all, squares ? 2.0 : 1.0) / static_cast<double>(rows);
    }
    for (Node& n : frontier) n.score = squares ? std::sqrt(n.score) : n.score;
    std::vector<Node> next;
    for (const Node& n : frontier) {
      const bool near = std::abs(n.score / thresholds[level] - 1.0) < margin;
      if (!(n.score > thresholds[level]) && !near) continue;
      const auto& first = n.tree->levels[level].first;
      for (std::int32_t c = first[static_cast<std::size_t>(n.index)];
           c < first[static_cast<std::size_t>(n.index) + 1]; ++c) {
        if (level + 1 < thresholds.size()) {
          next.push_back({n.tree, c});
        } else {
          kept.insert(n.tree->rows[static_cast<std::size_t>(c)]);
          if (near) doubtful->insert(n.tree->rows[static_cast<std::size_t>(c)]);
        }
      }
    }
    frontier = std::move(next);
  }
  return kept;
}

// Equation 1 with one level, equations 2 and 3 with two and three: single queries and averages over a
// question; as in the paper, and with mean squares and the spread of clusters, in one of the two or in both.
TEST(Squeezed, LookupIsThatOfThePaper) {
  ThreadPool pool(2);
  const struct {
    int levels;
    Spreads spreads;
    const char* options;
  } cases[] = {{1, Spreads::all, "spread=on"},
               {2, Spreads::all, "spread=on"},
               {3, Spreads::all, "spread=on"},
               {1, Spreads::alone, "spread=decode"},
               {1, Spreads::together, "spread=question"},
               {2, Spreads::alone, "spread=decode"},
               {1, Spreads::none, "spread=off"},
               {1, Spreads::none, "average=plain,centroids=f16"},
               {2, Spreads::none, "average=plain,centroids=f16"}};
  for (const auto& [levels, spreads, options] : cases) {
    World world({.kv_heads = 2, .group = 3, .dense = {2, 20}});
    const LayerGeometry geometry = world.geometry(pool);
    const bool as_paper = std::string_view(options).starts_with("average=plain");
    const auto selector = make(
        "squeezed:clusters=10%,clusters1=3%,sparsity=0.8,levels=" + std::to_string(levels) + "," + options,
        geometry);
    write(world, *selector, kContext);
    build(world, *selector);
    const Saved saved(
        *selector,
        {.heads = 2, .head_dim = 64, .levels = levels, .begin = 2, .spreads = spreads, .q8 = !as_paper},
        kContext);
    ASSERT_EQ(saved.segments.size(), 1u);
    EXPECT_EQ(saved.segments[0].end, kContext - 100);
    write(world, *selector, 12, Phase::question);
    std::int64_t kept = 0;
    for (const Phase phase : {Phase::question, Phase::generation}) {
      const std::int64_t tokens = phase == Phase::question ? 12 : 1;
      QueryBlock block = world.block(static_cast<Position>(kContext), tokens);
      block.phase = phase;
      const QueryKind kind = phase == Phase::question ? QueryKind::together : QueryKind::alone;
      SelectWork work;
      selector->take_work();
      std::vector<FarSet> found = select(*selector, block, geometry, &work);
      std::int64_t nodes = 0, all = 0;
      for (int head = 0; head < 2; ++head) {
        std::set<Position> doubtful;
        std::set<Position> expected =
            keep_exactly(saved.segments, block, geometry, head, thresholds(*selector, kind, tokens),
                         adds(spreads, kind), !as_paper, 1e-4, &doubtful, nodes);
        for (const ClusterLevel& level : saved.segments[0].heads[static_cast<std::size_t>(head)].levels)
          all += level.nodes();
        for (Position p = 500; p < block.far_end(0, geometry.dense); ++p)
          expected.insert(p);  // not clustered yet
        std::set<Position> own;
        for (const auto& [row, weight] : found[static_cast<std::size_t>(head * 3)]) own.insert(row);
        kept += std::ssize(own);
        for (const Position p : doubtful) {
          own.erase(p);
          expected.erase(p);
        }
        EXPECT_EQ(own, expected) << levels << " levels, " << options << ", head " << head;
      }
      // What is below a pruned node is not read.
      EXPECT_EQ(work.keys_scored, tokens * nodes) << levels;
      if (levels > 1) {
        EXPECT_LT(nodes, all) << levels;
      }
    }
    EXPECT_GT(kept, 0);
  }
}

/// Layers of one method that are calibrated together, each over a text of its own.
struct Layers {
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<LayerGeometry> geometries;
  std::vector<std::unique_ptr<Selector>> selectors;

  Layers(const std::string& spec, int count, std::int64_t tokens, ThreadPool& pool) {
    for (int layer = 0; layer < count; ++layer) {
      const WorldShape shape = {.kv_heads = 2, .group = 2, .dense = {0, 1}};
      worlds.push_back(std::make_unique<World>(shape, /*seed=*/static_cast<std::uint64_t>(layer + 1)));
      geometries.push_back(worlds.back()->geometry(pool));
      geometries.back().layer = layer;
      selectors.push_back(make(spec, geometries.back()));
      write(*worlds.back(), *selectors.back(), tokens);
      selectors.back()->build(0, worlds.back()->store().layer(0));
    }
    std::vector<Selector*> all;
    for (const auto& selector : selectors) all.push_back(selector.get());
    const auto keys = [&](int layer) { return worlds[static_cast<std::size_t>(layer)]->store().layer(0); };
    find_method(parse_spec(spec).name).finish(all, 0, keys);
  }
};

// Averages of random queries are nearly flat, and each layer and KV head has one of those that judge: a few layers would
// say little of a threshold.
TEST(Squeezed, ThresholdsReachTheirTargets) {
  ThreadPool pool(2);
  constexpr int kLayers = 12;
  // Coarse clusters of random keys are all alike to an average of queries: a handful would be kept or pruned
  // whole, so they are 10 % here.
  const std::string plain = "squeezed:clusters=10%,";
  for (const std::string& method :
       {plain, plain + "levels=2,clusters1=5%,", std::string("ideal:"), plain + "tail=on,"}) {
    for (const std::string target : {"sparsity=0.7", "sparsity=0.9", "mass=0.9", "error=0.2"}) {
      if (target == "sparsity=0.7" && method != plain) continue;  // a second share of keys: for one method
      SCOPED_TRACE(method + target);
      const Layers layers(method + target, kLayers, 1000, pool);
      const Calibration& c = calibration(*layers.selectors[0]);
      EXPECT_EQ(c.queries, Calibration::kMost);
      for (const QueryKind kind : kQueryKinds) {
        SCOPED_TRACE(kind == QueryKind::together ? "together" : "alone");
        const Achieved& a = c.held_out[static_cast<std::size_t>(kind)];
        if (target == "sparsity=0.7") {
          EXPECT_NEAR(a.sparsity, 0.7, 0.03);
        }
        if (target == "sparsity=0.9") {
          EXPECT_NEAR(a.sparsity, 0.9, 0.02);
        }
        if (target == "mass=0.9") {
          EXPECT_NEAR(a.mass, 0.9, 0.03);
        }
        if (target == "error=0.2") {
          EXPECT_NEAR(a.error, 0.2, 0.03);
        }
      }
      // And on queries of a question, in the counts of attention itself.
      if (!target.starts_with("sparsity")) continue;
      const double wanted = 1.0 - std::stod(target.substr(9));
      std::int64_t kept = 0;
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        World& world = *layers.worlds[layer];
        write(world, *layers.selectors[layer], 40, Phase::question);
        QueryBlock block = world.block(1000, 40);
        block.far_limit = 900;
        for (const FarSet& set : select(*layers.selectors[layer], block, layers.geometries[layer]))
          kept += std::ssize(set);
      }
      EXPECT_NEAR(static_cast<double>(kept) / (kLayers * 40.0 * 4 * 900), wanted, 0.03);
    }
  }
}

// The sample's tokens take turns: one calibrates, the next judges. Here those that judge ask for nothing in particular, so
// that no cluster reaches a threshold that was made for sharp queries.
TEST(Squeezed, WhatThresholdsAchieveIsMeasuredOnOtherQueries) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .dense = {0, 1}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:clusters=10%,sparsity=0.9", geometry);
  world.write(500);  // few enough for a sample of all tokens
  QueryBlock block = world.block(0, 500);
  std::vector<float> q(block.q_unrotated.begin(), block.q_unrotated.end());
  const std::size_t width = q.size() / 500;
  for (std::size_t i = 0; i < q.size(); ++i)
    if (i / width % 2 == 1) q[i] = 0.0f;
  block.q_unrotated = q;
  tell(*selector, block);
  build(world, *selector);
  EXPECT_GE(calibration(*selector).held_out[static_cast<std::size_t>(QueryKind::alone)].sparsity, 0.98);
}

TEST(Squeezed, NothingLeftOutIsFullAttentionToTheBit) {
  ThreadPool pool(2);
  for (const char* spec :
       {"squeezed:sparsity=0", "squeezed:mass=1", "squeezed:error=0,levels=2,tail=on", "ideal:sparsity=0"}) {
    World world({.kv_heads = 2, .group = 4, .type = DType::f16, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    const auto selector = make(spec, geometry);
    write(world, *selector, 400);
    build(world, *selector);
    write(world, *selector, 6, Phase::question);
    for (const std::int64_t tokens : {1, 6}) {
      QueryBlock block = world.block(static_cast<Position>(406 - tokens), tokens);
      block.phase = Phase::question;
      const Selection selection = selection_of(*selector, block, geometry);
      std::vector<float> sparse(block.q.size()), full(block.q.size());
      float* place = sparse.data();
      attend({&block, 1}, selection, geometry, {&place, 1});
      place = full.data();
      attend_full({&block, 1}, geometry, {&place, 1});
      EXPECT_EQ(sparse, full) << spec;
    }
  }
}

// With one key a cluster the tail is exact, and output and log-sum-exp are those of full attention; with one
// cluster it is what the formula says.
TEST(Squeezed, TailIsTheWeightAndMeanOfWhatWasPruned) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:clusters=100%,sparsity=0.9,tail=on,centroids=f16", geometry);
  write(world, *selector, 400);
  build(world, *selector);
  write(world, *selector, 9, Phase::question);
  QueryBlock block = world.block(400, 9);
  block.phase = Phase::question;
  const Selection selection = selection_of(*selector, block, geometry);
  EXPECT_LT(selection.keys(0), 200);
  std::vector<float> sparse(block.q.size()), full(block.q.size());
  float* place = sparse.data();
  attend({&block, 1}, selection, geometry, {&place, 1});
  place = full.data();
  attend_full({&block, 1}, geometry, {&place, 1});
  for (std::size_t i = 0; i < full.size(); ++i)
    ASSERT_NEAR(sparse[i], full[i], 3e-3);  // centroids are halves
}

TEST(Squeezed, AQuestionChoosesOnceAndStretchesChooseForThemselves) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .dense = {1, 20}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto whole = make("squeezed:sparsity=0.8,clusters=10%", geometry);
  const auto stretches = make("squeezed:sparsity=0.8,clusters=10%,block=4", geometry);
  EXPECT_EQ(whole->joint_query_tokens(), 0);
  EXPECT_EQ(stretches->joint_query_tokens(), 4);
  world.write(kContext);
  const QueryBlock last = world.block(0, kContext);
  for (Selector* s : {whole.get(), stretches.get()}) {
    s->on_write({.sequence = 0,
                 .phase = Phase::context,
                 .begin = 0,
                 .tokens = kContext,
                 .q_unrotated = {},
                 .k_unrotated = {},
                 .q = last.q,
                 .k = {},
                 .v = {}});
    build(world, *s);
  }
  world.write(10);
  QueryBlock block = world.block(kContext, 10);
  block.phase = Phase::question;
  EXPECT_EQ(selection_of(*whole, block, geometry).sets(), 1);
  const std::vector<FarSet> together = far_sets(selection_of(*stretches, block, geometry), block, geometry);
  std::vector<FarSet> apart;
  for (Position p = kContext; p < kContext + 10; p += 4) {
    QueryBlock part = world.block(p, std::min<std::int64_t>(4, kContext + 10 - p));
    part.phase = Phase::question;
    for (FarSet& set : far_sets(selection_of(*stretches, part, geometry), part, geometry))
      apart.push_back(std::move(set));
  }
  EXPECT_EQ(together, apart);
}

// Text that is appended later is clustered as a part of its own, and the thresholds are found anew.
TEST(Squeezed, AGrownContextIsTakenInAndCalibratedAgain) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .dense = {.sink = 0, .window = 100, .from_context = true}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:sparsity=0.8,clusters=10%", geometry);
  write(world, *selector, 400);
  build(world, *selector);
  const double before = thresholds(*selector, QueryKind::alone, 1)[0];
  write(world, *selector, 500);
  Selector* const layers[] = {nullptr, nullptr, nullptr, selector.get()};
  ThresholdSelector::finish(layers, 0, [&](int) { return world.store().layer(0); });
  EXPECT_NE(thresholds(*selector, QueryKind::alone, 1)[0], before);
  EXPECT_NEAR(calibration(*selector).held_out[1].sparsity, 0.8, 0.06);
  const Saved saved(
      *selector, {.heads = 2, .head_dim = 64, .levels = 1, .begin = 0, .spreads = Spreads::all, .q8 = true},
      900);
  ASSERT_EQ(saved.segments.size(), 2u);
  EXPECT_EQ(saved.segments[0].end, 300);
  EXPECT_EQ(saved.segments[1].end, 800);
}

// The queries that are left of a long text are few: thresholds are of these or of none, but not of the text
// that was cut.
TEST(Squeezed, ThresholdsOfATextThatWasCutAreForgotten) {
  ThreadPool pool(2);
  for (const auto& [left, more, found] :
       {std::tuple(1500, 400, true), std::tuple(200, 150, true), std::tuple(270, 10, false)}) {
    World world({.kv_heads = 2,
                 .group = 2,
                 .d = 16,
                 .dense = {.sink = 0, .window = 100, .from_context = true},
                 .max_tokens = 9000});
    const LayerGeometry geometry = world.geometry(pool);
    const auto selector = make("squeezed:sparsity=0.8,clusters=10%", geometry);
    write(world, *selector, 8000);
    build(world, *selector);
    const double before = thresholds(*selector, QueryKind::alone, 1)[0];
    world.store().roll_back(left);
    selector->roll_back(0, left);
    write(world, *selector, more);
    Selector* const layers[] = {nullptr, nullptr, nullptr, selector.get()};
    ThresholdSelector::finish(layers, 0, [&](int) { return world.store().layer(0); });
    EXPECT_EQ(calibration(*selector).queries > 0, found);
    if (found) {
      EXPECT_NE(thresholds(*selector, QueryKind::alone, 1)[0], before);
    }
    const std::int64_t tokens = left + more, end = tokens - 100;
    write(world, *selector, 100, Phase::generation);
    QueryBlock block = world.block(static_cast<Position>(tokens), 100);
    block.far_limit = static_cast<Position>(end);
    std::int64_t kept = 0;
    for (const FarSet& set : select(*selector, block, geometry)) kept += std::ssize(set);
    EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(100 * 4 * end), 0.2, 0.06);
  }
}

// A window that slides over an answer leaves keys behind, which are clustered when there are enough of them.
TEST(Squeezed, ALongAnswerIsClusteredInSteps) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:sparsity=0.9,clusters=10%", geometry);
  write(world, *selector, 400);
  build(world, *selector);
  std::int64_t most = 0;
  for (int step = 0; step < 500; ++step) {
    write(world, *selector, 1, Phase::generation);
    const QueryBlock block = world.block(static_cast<Position>(400 + step), 1);
    most = std::max(most, selection_of(*selector, block, geometry).keys(0));
  }
  // 127 keys that wait, and a tenth of the rest, which varies from query to query.
  EXPECT_LT(most, 127 + 350);
  const Saved saved(
      *selector, {.heads = 1, .head_dim = 64, .levels = 1, .begin = 1, .spreads = Spreads::all, .q8 = true},
      900);
  EXPECT_EQ(saved.segments.back().end, 300 + (900 - 16 + 1 - 300 - 1) / 128 * 128);
}

/// Saves one selector's index and loads it into another.
void hand_over(World& world, const Selector& from, Selector& to) {
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("handed-" + std::to_string(getpid()));
  ContainerWriter out(path);
  SectionWriter sections(out, "x/");
  from.save(0, sections);
  out.finish();
  const ContainerReader in(path);
  SectionReader reader(in, "x/");
  to.load(0, reader, world.store().layer(0));
  std::filesystem::remove(path);
}

// What a file knows of a long text is not forgotten for the queries of a few words behind it.
TEST(Squeezed, ThresholdsOfAFileStayUntilMoreIsKnown) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .dense = {.sink = 0, .window = 100, .from_context = true}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:sparsity=0.8,clusters=10%";
  const auto selector = make(spec, geometry), loaded = make(spec, geometry);
  write(world, *selector, 400);
  build(world, *selector);
  const double before = thresholds(*selector, QueryKind::alone, 1)[0];
  hand_over(world, *selector, *loaded);
  Selector* const layers[] = {nullptr, nullptr, nullptr, loaded.get()};
  for (const auto& [more, stays] : {std::pair(300, true), std::pair(300, false)}) {
    write(world, *loaded, more);
    ThresholdSelector::finish(layers, 0, [&](int) { return world.store().layer(0); });
    EXPECT_EQ(thresholds(*loaded, QueryKind::alone, 1)[0] == before, stays);
  }
}

// A text that was heard and never built is taken in as one that was, keys of the sink apart.
TEST(Squeezed, ATextThatWasOnlyHeardIsTakenInWhole) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .dense = {.sink = 3, .window = 100, .from_context = true}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:sparsity=0.8,clusters=10%";
  const auto built = make(spec, geometry), heard = make(spec, geometry);
  write(world, *built, 400);
  tell(*heard, world.block(0, 400));
  build(world, *built);
  Selector* const layers[] = {nullptr, nullptr, nullptr, heard.get()};
  ThresholdSelector::finish(layers, 0, [&](int) { return world.store().layer(0); });
  EXPECT_EQ(thresholds(*heard, QueryKind::alone, 1), thresholds(*built, QueryKind::alone, 1));
  const QueryBlock block = world.block(399, 1);
  EXPECT_EQ(select(*heard, block, geometry), select(*built, block, geometry));
}

// A context too short for an index still gives the metric by which a long answer is clustered, and a file
// keeps it and whose scores add spreads.
TEST(Squeezed, AnAnswerToAShortContextIsClusteredByItsQueries) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:sparsity=0.9,clusters=10%";
  const auto selector = make(spec + ",spread=decode", geometry), loaded = make(spec, geometry),
             again = make(spec, geometry);
  write(world, *selector, 90);
  build(world, *selector);
  hand_over(world, *selector, *again);
  hand_over(world, *again, *loaded);  // and what was read is written
  write(world, *selector, 400, Phase::generation);
  const auto end = static_cast<Position>(world.tokens() - 16);
  selector->append(0, world.store().layer(0), end);
  loaded->append(0, world.store().layer(0), end);
  const ClusterShape shape = {
      .heads = 1, .head_dim = 64, .levels = 1, .begin = 1, .spreads = Spreads::alone, .q8 = true};
  const Saved own(*selector, shape, world.tokens()), other(*loaded, shape, world.tokens());
  ASSERT_EQ(own.segments.size(), 3u);
  ASSERT_EQ(other.segments.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(own.segments[i].heads[0].rows, other.segments[i].heads[0].rows);
  const QueryBlock block = world.block(world.tokens() - 1, 1);
  EXPECT_EQ(select(*loaded, block, geometry), select(*selector, block, geometry));
}

// A spec that does not say whether scores add spreads takes a file as it was indexed, and what comes later is
// clustered likewise; one that says otherwise is refused. An index beside it is not taken for its own.
TEST(Squeezed, AFileKeepsItsSpreadsUnlessTheSpecAsksForOthers) {
  ThreadPool pool(2);
  const struct {
    Spreads spreads;
    const char *asked, *other;
  } cases[] = {{Spreads::none, "off", "on"},
               {Spreads::all, "on", "decode"},
               {Spreads::alone, "decode", "question"},
               {Spreads::together, "question", "off"}};
  for (const auto& [spreads, asked, others] : cases) {
    World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    const std::string spec = "squeezed:sparsity=0.9,clusters=10%", with = spec + ",spread=";
    const auto indexed = make(with + asked, geometry), loaded = make(spec, geometry),
               other = make(with + others, geometry), fresh = make(spec, geometry);
    write(world, *indexed, 400);
    build(world, *indexed);
    hand_over(world, *indexed, *loaded);
    EXPECT_THROW(hand_over(world, *indexed, *other), InputError);
    EXPECT_EQ(dynamic_cast<SharesIndex&>(*fresh).take_index(0, *loaded, world.store().layer(0)),
              spreads != Spreads::none);
    const QueryBlock block = world.block(399, 1);
    EXPECT_EQ(select(*loaded, block, geometry), select(*indexed, block, geometry));
    write(world, *indexed, 200, Phase::generation);
    const auto end = static_cast<Position>(world.tokens() - 16);
    for (Selector* const selector : {indexed.get(), loaded.get()})
      selector->append(0, world.store().layer(0), end);
    const ClusterShape shape = {
        .heads = 1, .head_dim = 64, .levels = 1, .begin = 1, .spreads = spreads, .q8 = true};
    const Saved own(*indexed, shape, world.tokens()), its(*loaded, shape, world.tokens());
    ASSERT_EQ(own.segments.size(), 3u);
    ASSERT_EQ(its.segments.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      const ClusterTree &a = own.segments[i].heads[0], &b = its.segments[i].heads[0];
      EXPECT_EQ(a.rows, b.rows);
      EXPECT_EQ(a.levels[0].spreads, b.levels[0].spreads);
    }
  }
}

TEST(Squeezed, LogitsOfHundredsAndQueriesThatAreNotNumbers) {
  ThreadPool pool(2);
  for (const float factor : {300.0f, 1e30f}) {
    World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
    world.shape_key = [=](Position, int, int, float x) { return x * factor; };
    const LayerGeometry geometry = world.geometry(pool);
    for (const char* spec : {"squeezed:tail=on", "squeezed:levels=2,mass=0.5", "ideal"}) {
      const auto selector = make(spec, geometry);
      world.store().roll_back(0);
      write(world, *selector, 300);
      build(world, *selector);
      for (const Achieved& a : calibration(*selector).held_out) {
        EXPECT_TRUE(std::isfinite(a.sparsity) && std::isfinite(a.mass)) << spec << factor;
      }
      write(world, *selector, 3, Phase::question);
      QueryBlock block = world.block(300, 3);
      block.phase = Phase::question;
      std::vector<float> q(block.q.begin(), block.q.end());
      std::fill_n(q.begin(), 64, std::nanf(""));  // one query of one token
      const std::vector<FarSet> clean = select(*selector, block, geometry);
      block.q = q;
      const std::vector<FarSet> poisoned = select(*selector, block, geometry);
      EXPECT_EQ(clean.size(), poisoned.size());
    }
  }
}

TEST(Squeezed, ShortContextsAndLongQuestions) {
  ThreadPool pool(2);
  for (const std::int64_t context : {1, 2, 99, 100, 101, 102, 103, 130}) {
    World world({.kv_heads = 1, .group = 2, .dense = {.sink = 0, .window = 100, .from_context = true}});
    const LayerGeometry geometry = world.geometry(pool);
    for (const char* spec : {"squeezed", "squeezed:levels=3,tail=on", "squeezed:levels=auto",
                             "squeezed:clusters=5000", "ideal"}) {
      world.store().roll_back(0);
      const auto selector = make(spec, geometry);
      write(world, *selector, context);
      build(world, *selector);
      write(world, *selector, 300, Phase::question);
      QueryBlock block = world.block(static_cast<Position>(context), 300);
      block.phase = Phase::question;
      block.far_limit = static_cast<Position>(std::max<std::int64_t>(0, context - 100));
      std::vector<std::string> problems;
      far_sets(selection_of(*selector, block, geometry), block, geometry, &problems);
      EXPECT_TRUE(problems.empty()) << problems.front();
    }
  }
}

// A fixed branching factor: eight times the context, a level more, and the same number of keys kept. Clusters
// are a fifth of the keys, so that 4k and 32k keys have the trees of 16k and 128k at the default share.
TEST(Squeezed, AutoLevelsReadLittleMoreOfALongerContext) {
  constexpr std::int64_t kKept = 256, kShort = 4096, kLong = 32768;
  ThreadPool pool(2);
  const auto bytes_at = [&](std::int64_t context) {
    World world(
        {.kv_heads = 1, .group = 2, .d = 16, .dense = {.sink = 0, .window = 1}, .max_tokens = context + 64});
    plant_topics(world, 512, 0.3f);
    const LayerGeometry geometry = world.geometry(pool);
    const double sparsity = 1.0 - static_cast<double>(kKept) / static_cast<double>(context);
    const auto selector =
        make("squeezed:levels=auto,clusters=20%,sparsity=" + std::to_string(sparsity), geometry);
    write(world, *selector, context);
    build(world, *selector);
    write(world, *selector, 64, Phase::generation);
    QueryBlock block = world.block(static_cast<Position>(context), 64);
    block.phase = Phase::generation;
    block.far_limit = static_cast<Position>(context - 100);
    selector->take_work();
    SelectWork work;
    std::int64_t kept = 0;
    for (const FarSet& set : select(*selector, block, geometry, &work)) kept += std::ssize(set);
    EXPECT_NEAR(static_cast<double>(kept) / (64 * 2), kKept, kKept / 2) << context;
    EXPECT_GT(work.bytes, 0) << context;
    return static_cast<double>(work.bytes);
  };
  const double shorter = bytes_at(kShort), longer = bytes_at(kLong);
  EXPECT_LT(longer, 2.0 * shorter) << longer / shorter;
}

// levels=auto has one level, but where a lookup keeps so few keys that a level keeps a number of its nodes
// instead of a share: there a node has four children. Levels that are asked for have eight.
TEST(Squeezed, AutoLevelsHaveFewChildrenWhereFewKeysAreKept) {
  const auto nodes = [](const char* spec, std::int64_t keys) {
    return cluster_plan(parse_spec(spec), keys).nodes;
  };
  const std::int64_t m = 1 << 20;
  using Nodes = std::vector<std::int64_t>;
  EXPECT_EQ(nodes("squeezed:levels=auto", 16384), (Nodes{820}));
  EXPECT_EQ(nodes("squeezed:levels=auto,sparsity=0.95", 16384), (Nodes{820}));
  EXPECT_EQ(nodes("squeezed:levels=auto", m / 8), (Nodes{6554}));
  EXPECT_EQ(nodes("squeezed:levels=auto,mass=0.9", m / 8), (Nodes{6554}));
  EXPECT_EQ(nodes("squeezed:levels=auto,kept1=0.5", m / 8), (Nodes{820, 6554}));
  EXPECT_EQ(nodes("squeezed:levels=auto,sparsity=0.99", m / 8), (Nodes{410, 1639, 6554}));
  EXPECT_EQ(nodes("squeezed:levels=auto,sparsity=0.99,branch=8", m / 8), (Nodes{820, 6554}));
  EXPECT_EQ(nodes("squeezed:levels=auto,sparsity=0.99975", 4 * m),
            (Nodes{205, 820, 3277, 13108, 52429, 209716}));
}

// A level prunes a third of what the one below it does; where a lookup must not grow, 48 nodes of each are
// kept, and 220 in all.
TEST(Squeezed, AutoLevelsPruneLittleAboveTheLeaves) {
  const auto kept = [](const char* spec, std::int64_t keys) {
    return cluster_plan(parse_spec(spec), keys).kept;
  };
  const std::int64_t m = 1 << 20;
  const auto expect = [](const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << i;
  };
  expect(kept("squeezed:levels=auto", m / 64), {0.1});
  expect(kept("squeezed:levels=auto,branch=8", m / 8), {0.7, 0.1});
  expect(kept("squeezed:levels=auto,branch=8,sparsity=0.7", m / 8), {1.0 - 0.7 / 3.0, 0.3});
  expect(kept("squeezed:levels=auto,branch=8", m), {0.9, 0.7, 0.1});
  expect(kept("squeezed:levels=auto,kept1=0.5", m), {0.5, 0.25, 0.1});
  expect(kept("squeezed:levels=auto,sparsity=0.99", m / 8), {48.0 / 410, 48.0 / 1639, 0.01});
  expect(kept("squeezed:levels=auto,sparsity=0.999", m),
         {48.0 / 205, 48.0 / 820, 48.0 / 3277, 48.0 / 13108, 0.001});
  expect(kept("squeezed:levels=auto,sparsity=0.99975", 4 * m),
         {44.0 / 205, 44.0 / 820, 44.0 / 3277, 44.0 / 13108, 44.0 / 52429, 0.00025});
}

// Leaves do not depend on how many levels are above them.
TEST(Squeezed, LevelsThatPruneNothingChooseAsOneLevel) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 16, .dense = {.sink = 1, .window = 16}, .max_tokens = 3000});
  plant_topics(world, 64, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:clusters=50%";
  const auto one = make(spec, geometry), two = make(spec + ",levels=2,kept1=1", geometry),
             any = make(spec + ",levels=auto,kept1=1", geometry),
             own = make(spec + ",levels=auto,branch=8", geometry);
  constexpr std::int64_t kLong = 2500;
  world.write(kLong);
  for (Selector* const selector : {one.get(), two.get(), any.get(), own.get()}) {
    tell(*selector, world.block(0, kLong));
    build(world, *selector);
  }
  world.write(9);
  QueryBlock block = world.block(static_cast<Position>(kLong), 9);
  for (const Phase phase : {Phase::question, Phase::generation}) {
    block.phase = phase;
    const std::vector<FarSet> expected = select(*one, block, geometry);
    EXPECT_TRUE(select(*two, block, geometry) == expected);
    EXPECT_TRUE(select(*any, block, geometry) == expected);
    EXPECT_FALSE(select(*own, block, geometry) == expected);  // several levels, of which the upper ones prune
  }
}

// What a level above the leaves keeps is planned for and calibrated with the same share, whatever the target.
TEST(Squeezed, AutoLevelsKeepAsPlannedForAnyTarget) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 16, .dense = {.sink = 1, .window = 16}, .max_tokens = 3000});
  plant_topics(world, 64, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:levels=auto,branch=8,clusters=50%";
  const auto share = make(spec + ",sparsity=0.9", geometry), mass = make(spec + ",mass=0.2", geometry);
  world.write(2500);
  for (Selector* const selector : {share.get(), mass.get()}) {
    tell(*selector, world.block(0, 2500));
    build(world, *selector);
  }
  EXPECT_EQ(cluster_plan(parse_spec(spec + ",mass=0.2"), 2399).kept[0], 0.7);
  for (const QueryKind kind : kQueryKinds) {
    const double top = thresholds(*share, kind, 20)[0];
    EXPECT_GT(top, 0.0);
    EXPECT_EQ(thresholds(*mass, kind, 20)[0], top);
  }
}

// A share that is named gives levels=auto levels, which it has not by itself where many keys are kept.
TEST(Squeezed, AnIndexIsTakenFromOneOfAsManyLevels) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 16, .dense = {.sink = 1, .window = 16}, .max_tokens = 3000});
  plant_topics(world, 64, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:levels=auto,clusters=50%";
  const auto own = make(spec + ",kept1=0.5", geometry);
  world.write(2500);
  tell(*own, world.block(0, 2500));
  build(world, *own);
  for (const auto& [other, taken] : {std::pair{"", false}, {",kept1=0.7", true}, {",branch=4", false}}) {
    const auto fresh = make(spec + other, geometry);
    EXPECT_EQ(dynamic_cast<SharesIndex&>(*fresh).take_index(0, *own, world.store().layer(0)), taken) << other;
  }
}

// As many keys are kept of a question of any length: thresholds rise with the tokens that choose together.
TEST(Squeezed, QuestionsOfAnyLengthKeepAsManyKeys) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 16, .dense = {.sink = 0, .window = 1}, .max_tokens = 3000});
  plant_topics(world, 64, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:sparsity=0.8,clusters=20%", geometry);
  write(world, *selector, 2000);
  build(world, *selector);
  EXPECT_GT(thresholds(*selector, QueryKind::together, 200)[0],
            1.2 * thresholds(*selector, QueryKind::together, 4)[0]);
  write(world, *selector, 960, Phase::question);
  for (const std::int64_t tokens : {8, 40, 240, 960}) {
    std::int64_t kept = 0;
    for (Position begin = 2000; begin < 2960; begin += static_cast<Position>(tokens)) {
      QueryBlock block = world.block(begin, tokens);
      block.phase = Phase::question;
      block.far_limit = 1900;
      for (const FarSet& set : select(*selector, block, geometry)) kept += std::ssize(set);
    }
    EXPECT_NEAR(static_cast<double>(kept) / (960.0 * 4 * 1900), 0.2, 0.05) << tokens;
  }
}

// A file of another branching is read as it is, chooses as it did, and what comes later is clustered into as
// many levels, with as many children.
TEST(Squeezed, AFileOfAnotherBranchingGrowsAsItIs) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 16, .dense = {.sink = 0, .window = 16}, .max_tokens = 6000});
  plant_topics(world, 64, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "squeezed:levels=auto,clusters=50%,sparsity=0.98";
  const auto indexed = make(spec + ",branch=8", geometry), loaded = make(spec, geometry);
  write(world, *indexed, 4800);
  build(world, *indexed);
  hand_over(world, *indexed, *loaded);
  const QueryBlock block = world.block(4799, 1);
  EXPECT_EQ(select(*loaded, block, geometry), select(*indexed, block, geometry));
  write(world, *indexed, 300, Phase::generation);
  const auto end = static_cast<Position>(world.tokens() - 16);
  for (Selector* const selector : {indexed.get(), loaded.get()})
    selector->append(0, world.store().layer(0), end);
  const ClusterShape shape = {.heads = 1, .head_dim = 16, .levels = 2, .spreads = Spreads::all, .q8 = true};
  const Saved own(*indexed, shape, world.tokens()), its(*loaded, shape, world.tokens());
  ASSERT_EQ(own.segments.size(), 4u);
  ASSERT_EQ(its.segments.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const ClusterTree &a = own.segments[i].heads[0], &b = its.segments[i].heads[0];
    EXPECT_EQ(a.rows, b.rows) << i;
    EXPECT_NEAR(static_cast<double>(b.levels[1].nodes()) / b.levels[0].nodes(), 8.0, 0.5) << i;
  }
  // An index that is made now has four, and so a level more.
  EXPECT_EQ(cluster_plan(parse_spec(spec), 4700).nodes, (std::vector<std::int64_t>{147, 588, 2350}));
}

TEST(Squeezed, SpecsOutOfRangeAreRefused) {
  for (const char* spec :
       {"squeezed:sparsity=1", "squeezed:sparsity=0.5,mass=0.9", "squeezed:levels=0", "squeezed:levels=17",
        "squeezed:branch=1", "squeezed:block=0", "squeezed:tail=maybe", "squeezed:spread=1",
        "squeezed:average=most", "squeezed:clusters=0", "ideal:mass=2", "squeezed:error=-1",
        "squeezed:levels=some", "squeezed:centroids=q4"}) {
    EXPECT_THROW(parse_spec(spec), InputError) << spec;
  }
  EXPECT_TRUE(parse_spec("squeezed").dense.from_context);
  EXPECT_FALSE(parse_spec("squeezed:window=64").dense.from_context);
}

/// The sections of a saved index, to be changed and loaded again.
struct Sections {
  std::map<std::string, std::vector<std::byte>> all;
  template <class T>
  std::span<T> of(const char* name) {
    std::vector<std::byte>& raw = all.at(name);
    return {reinterpret_cast<T*>(raw.data()), raw.size() / sizeof(T)};
  }
};

TEST(Squeezed, DamagedIndexesAreRefusedAndLeaveTheOldOne) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make("squeezed:levels=2,clusters=20,clusters1=6,tail=on,spread=on", geometry);
  write(world, *selector, 220);
  build(world, *selector);
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("damaged-" + std::to_string(getpid()));
  Sections good;
  {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    selector->save(0, sections);
    out.finish();
    const ContainerReader in(path);
    for (const SectionInfo& s : in.sections()) {
      const auto raw = in.bytes(s.name);
      good.all[s.name.substr(2)] = {raw.begin(), raw.end()};
    }
  }
  const auto load = [&](const Sections& s) {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    for (const auto& [name, raw] : s.all) sections.add(name, std::span<const std::byte>(raw));
    out.finish();
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    selector->load(0, reader, world.store().layer(0));
  };
  load(good);
  const QueryBlock block = world.block(219, 1);
  const std::vector<FarSet> before = select(*selector, block, geometry);
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::function<void(Sections&)>> damages = {
      [](Sections& s) { s.all["shape"].resize(8); },
      [](Sections& s) { s.of<std::int64_t>("shape")[0] = 3; },
      [](Sections& s) { s.of<std::int64_t>("shape")[1] = 128; },
      [](Sections& s) { s.of<std::int64_t>("shape")[2] = 1; },
      [](Sections& s) { s.of<std::int64_t>("shape")[3] = 0; },
      [](Sections& s) { s.of<std::int64_t>("shape")[4] = 0; },
      [](Sections& s) { s.of<std::int64_t>("shape")[5] = -1; },
      [](Sections& s) { s.of<std::int64_t>("shape")[5] = std::int64_t{1} << 60; },
      [](Sections& s) { s.of<std::int64_t>("shape")[5] = 0; },
      [](Sections& s) { s.of<std::int64_t>("shape")[6] = 221; },
      [](Sections& s) { s.of<std::int64_t>("shape")[6] = 1; },
      [](Sections& s) { s.of<std::int64_t>("shape")[7] = 1; },
      [](Sections& s) { s.of<std::int64_t>("shape")[8] = 0; },
      [](Sections& s) { s.of<std::int64_t>("shape")[8] = std::int64_t{1} << 61; },
      [](Sections& s) { s.of<std::int32_t>("first")[0] = 1; },
      [](Sections& s) { s.of<std::int32_t>("first")[1] = 0; },
      [](Sections& s) { s.of<std::int32_t>("first")[1] = 1 << 30; },
      [](Sections& s) { s.of<std::int32_t>("first")[1] = -4; },
      [](Sections& s) { s.of<std::int32_t>("keys")[0] += 1; },
      [](Sections& s) { s.of<std::int32_t>("keys")[0] = -1; },
      [](Sections& s) { s.of<std::int8_t>("centroids")[3] = -128; },
      [](Sections& s) { s.all.erase("scales"); },
      [](Sections& s) { s.all["scales"].resize(s.all["scales"].size() - 4); },
      [=](Sections& s) { s.of<float>("scales")[1] = -inf; },
      [](Sections& s) { s.of<std::int64_t>("shape")[4] = 9; },  // then centroids have 16 bits
      [](Sections& s) { s.of<std::int64_t>("shape")[4] = 7; },  // spreads of each dimension
      [](Sections& s) { s.of<std::uint16_t>("values")[3] = 0x7e00; },
      [](Sections& s) { s.all["values"].clear(); },
      [](Sections& s) { s.of<std::int64_t>("shape")[4] = 1; },
      [](Sections& s) { s.all.erase("spreads"); },
      [](Sections& s) { s.all["spreads"].pop_back(); },
      [](Sections& s) { s.of<std::int8_t>("spreads")[3] = -1; },
      [](Sections& s) { s.of<float>("spread_scales")[0] = -1.0f; },
      [=](Sections& s) { s.of<float>("spread_scales")[0] = inf; },
      [](Sections& s) { s.all["metric"].clear(); },
      [](Sections& s) { s.all["centroids"].pop_back(); },
      [](Sections& s) { s.of<Position>("rows")[0] = 120; },
      [](Sections& s) { s.of<Position>("rows")[0] = -1; },
      [](Sections& s) { s.of<Position>("rows")[0] = 0; },
      [](Sections& s) { s.all["rows"].resize(s.all["rows"].size() - 4); },
      [](Sections& s) { s.all.erase("rows"); },
      [](Sections& s) { s.all.erase("calibration"); },
      [](Sections& s) { s.of<double>("calibration")[0] = 1e9; },
      [](Sections& s) { s.of<double>("calibration")[1] = 1; },
      [](Sections& s) { s.of<double>("calibration")[1] = 1e300; },
      [](Sections& s) { s.of<double>("calibration")[2] = -1; },
      [=](Sections& s) { s.of<double>("calibration")[2] = inf; },
      [](Sections& s) { s.of<double>("calibration")[2] = std::nan(""); },
      [](Sections& s) { s.of<double>("calibration").back() = 0.51; },  // a power
      [](Sections& s) { s.of<double>("calibration").back() = -0.1; },
      [](Sections& s) { s.all["calibration"].resize(16); },
      [](Sections& s) { s.all["calibration"].resize(s.all["calibration"].size() - 8); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    Sections bad = good;
    damages[i](bad);
    EXPECT_THROW(load(bad), InputError) << i;
    EXPECT_EQ(select(*selector, block, geometry), before) << i;
  }
  Sections older = good;  // one threshold for questions of any length
  older.all["calibration"].resize(older.all["calibration"].size() - 2 * sizeof(double));
  load(older);
  EXPECT_EQ(thresholds(*selector, QueryKind::together, 100), thresholds(*selector, QueryKind::together, 1));
  EXPECT_EQ(select(*selector, block, geometry), before);
  std::filesystem::remove(path);
}

// Every option that is read can be given.
TEST(Squeezed, AllOptionsAreNamed) {
  for (const char* text :
       {"squeezed:levels=2,kept1=0.5", "squeezed:metric=cosine,clusters=3%,block=4,spread=off,average=plain",
        "squeezed:levels=auto,branch=16,tail=on", "squeezed:mass=0.9"})
    EXPECT_EQ(parse_spec(text).name, "squeezed") << text;
  EXPECT_THROW(parse_spec("squeezed:kept2=0.5"), InputError);
}

}  // namespace
}  // namespace lode::test
