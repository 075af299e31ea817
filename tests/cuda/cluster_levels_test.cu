// SPDX-License-Identifier: Apache-2.0
// Clusters of several levels above their thresholds, against equations 2 and 3 in float64: the children of
// kept nodes are compared among themselves, none of a pruned one is listed; several parts, several tokens
// that choose together, queries that are not numbers; centroids in 16 bits, in 8, and in 8 with spreads.
#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/saap/probe.h"
#include "kernels/cuda/squeezed/cluster_levels.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;

struct Shape {
  int query_heads, kv_heads, dim;
  std::vector<int> parts;     // coarsest nodes of each, all heads
  std::vector<int> branches;  // children of one node on average, level by level, the last one keys
  int tokens = 1, stretch = 1;
  int counted = 1 << 30;                  // parts that count
  std::vector<double> kept = {0.5, 0.2};  // share of the compared nodes above a level's threshold; 1: 0
  float width = 1.0f;
  bool squares = false;
  CentroidKind kind = CentroidKind::f16;
  bool adds = true;  // scores add the spreads that there are
};

struct Level {
  Rows first, keys;                           // [nodes + 1], [nodes]; all heads
  std::vector<std::uint16_t> halves;          // [Hkv, nodes, d]
  std::vector<std::byte> centroids, spreads;  // [Hkv, nodes, d] in place of them, [Hkv, nodes, planes]
  std::vector<float> scales, spread_scales;   // [Hkv, nodes]
  int nodes() const { return static_cast<int>(keys.size()); }
};

struct Case {
  Shape shape;
  std::vector<Level> levels;
  std::vector<float> q;    // [tokens, Hq, d]
  std::vector<Rows> rows;  // [Hkv][keys]
  int counted_top = 0, counted_keys = 0, part_count = 0;
  Rows top;  // [parts + 1]
};

constexpr int kSink = 3, kWindow = 20, kBehind = 17;  // keys between the index and the window

void draw_nodes(const Shape& s, Level& level, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const int all = s.kv_heads * level.nodes();
  for (int i = 0; i < all * s.dim; ++i) level.halves.push_back(to_f16(s.width * normal(random)).bits);
  if (s.kind == CentroidKind::f16) return;
  for (int i = 0; i < all * s.dim; ++i)
    level.centroids.push_back(static_cast<std::byte>(static_cast<int>(random() % 255) - 127));
  for (int i = 0; i < all * ((s.dim + 1) / 2); ++i)
    level.spreads.push_back(static_cast<std::byte>(random() % 128));
  for (int i = 0; i < all; ++i) {
    level.scales.push_back(s.width / 73.0f * (0.5f + static_cast<float>(random() % 100) / 100.0f));
    level.spread_scales.push_back(i % 7 == 0 ? 0.0f : s.width * static_cast<float>(random() % 100) / 300.0f);
  }
}

/// Numbers of children are uneven, the first node of each part has many; all heads have the same tree.
Case make_case(const Shape& s, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Case c = {.shape = s};
  c.top = {0};
  for (const int nodes : s.parts) c.top.push_back(c.top.back() + nodes);
  c.part_count = std::min<int>(s.counted, static_cast<int>(s.parts.size()));
  c.counted_top = c.top[static_cast<std::size_t>(c.part_count)];
  int nodes = c.top.back();
  for (const int branch : s.branches) {
    Level level;
    level.first = {0};
    for (int i = 0; i < nodes; ++i)
      level.first.push_back(level.first.back() +
                            (i == 0 ? 3 * branch : 1 + static_cast<int>(random() % (2 * branch))));
    level.keys.resize(static_cast<std::size_t>(nodes));
    draw_nodes(s, level, random);
    nodes = level.first.back();
    c.levels.push_back(std::move(level));
  }
  for (std::size_t l = c.levels.size(); l-- > 0;) {
    Level& level = c.levels[l];
    for (std::size_t i = 0; i < level.keys.size(); ++i) {
      level.keys[i] = 0;
      for (int child = level.first[i]; child < level.first[i + 1]; ++child)
        level.keys[i] += l + 1 < c.levels.size() ? c.levels[l + 1].keys[static_cast<std::size_t>(child)] : 1;
    }
  }
  for (int i = 0; i < c.counted_top; ++i) c.counted_keys += c.levels[0].keys[static_cast<std::size_t>(i)];
  for (int h = 0; h < s.kv_heads; ++h) {
    Rows rows(static_cast<std::size_t>(nodes));
    for (int i = 0; i < nodes; ++i) rows[static_cast<std::size_t>(i)] = kSink + i;
    std::shuffle(rows.begin(), rows.begin() + c.counted_keys, random);
    c.rows.push_back(rows);
  }
  for (int i = 0; i < s.tokens * s.query_heads * s.dim; ++i) c.q.push_back(normal(random));
  return c;
}

/// The logit of a node for a scaled query: what of the centroid, what of the spread.
double logit(const Case& c, const Level& level, const float* q, int h, int node) {
  const Shape& s = c.shape;
  const double scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
  const auto row = static_cast<std::size_t>(h * level.nodes() + node), d = static_cast<std::size_t>(s.dim),
             planes = (d + 1) / 2;
  double z = 0.0, variance = 0.0;
  for (std::size_t j = 0; j < d; ++j) {
    const double own = scale * q[j];
    if (s.kind == CentroidKind::f16) {
      z += own * to_float(f16{level.halves[row * d + j]});
      continue;
    }
    z += own * static_cast<signed char>(level.centroids[row * d + j]) * level.scales[row];
    variance += own * own * static_cast<signed char>(level.spreads[row * planes + j % planes]) *
                static_cast<double>(level.spread_scales[row]);
  }
  if (s.kind != CentroidKind::q8_spreads || !s.adds) return z;
  const double deviation = std::sqrt(variance),
               most = std::sqrt(2.0 * std::log(level.keys[static_cast<std::size_t>(node)])),
               below = std::min(deviation, most);
  return z + below * (deviation - below / 2.0);
}

/// Mean (or root of the mean square) of K exp / sum over the queries of tokens [begin, end), for the nodes of
/// a frontier.
std::vector<double> weights(const Case& c, int l, const Rows& frontier, int begin, int end, int h) {
  const Shape& s = c.shape;
  const Level& level = c.levels[static_cast<std::size_t>(l)];
  const int group = s.query_heads / s.kv_heads;
  std::vector<double> sum(frontier.size(), 0.0), z(frontier.size());
  for (int row = begin * group; row < end * group; ++row) {
    const float* const q = c.q.data() + (row / group * s.query_heads + h * group + row % group) * s.dim;
    if (frontier.empty() || std::any_of(q, q + s.dim, [](float x) { return !std::isfinite(x); })) continue;
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = logit(c, level, q, h, frontier[i]);
    const double most = *std::max_element(z.begin(), z.end());
    double total = 0.0;
    for (std::size_t i = 0; i < z.size(); ++i)
      total += level.keys[static_cast<std::size_t>(frontier[i])] * std::exp(z[i] - most);
    for (std::size_t i = 0; i < z.size(); ++i)
      sum[i] += std::pow(std::exp(z[i] - most) / total * c.counted_keys, s.squares ? 2 : 1) /
                ((end - begin) * group);
  }
  for (double& x : sum) x = s.squares ? std::sqrt(x) : x;
  return sum;
}

/// Between the two weights near the wanted quantile that are furthest apart, so that rounding decides
/// nothing.
double threshold_for(std::vector<double> all, double kept) {
  if (kept >= 1.0 || all.size() < 2) return 0.0;
  std::sort(all.begin(), all.end());
  const auto at = static_cast<std::size_t>((1.0 - kept) * static_cast<double>(all.size() - 2));
  std::size_t best = at;
  for (std::size_t i = at < 60 ? 0 : at - 60; i + 1 < all.size() && i < at + 60; ++i)
    if (all[i + 1] / std::max(all[i], 1e-30) > all[best + 1] / std::max(all[best], 1e-30)) best = i;
  return std::sqrt(all[best] * all[best + 1]);
}

struct Expected {
  std::vector<double> thresholds;            // [levels]
  std::vector<std::vector<Rows>> frontiers;  // [stretches x Hkv][levels + 1] the last ones are keys' places
  std::vector<std::vector<double>> last;     // [stretches x Hkv] weights at the finest level
};

Expected expect(const Case& c) {
  const Shape& s = c.shape;
  const int stretches = (s.tokens + s.stretch - 1) / s.stretch, count = static_cast<int>(c.levels.size());
  Expected e;
  e.frontiers.assign(static_cast<std::size_t>(stretches * s.kv_heads),
                     {Rows(static_cast<std::size_t>(c.counted_top))});
  for (auto& f : e.frontiers)
    for (int i = 0; i < c.counted_top; ++i) f[0][static_cast<std::size_t>(i)] = i;
  e.last.resize(e.frontiers.size());
  for (int l = 0; l < count; ++l) {
    std::vector<double> all;
    std::vector<std::vector<double>> of(e.frontiers.size());
    for (std::size_t i = 0; i < of.size(); ++i) {
      const int stretch = static_cast<int>(i) / s.kv_heads, begin = stretch * s.stretch;
      of[i] = weights(c, l, e.frontiers[i].back(), begin, std::min(begin + s.stretch, s.tokens),
                      static_cast<int>(i) % s.kv_heads);
      all.insert(all.end(), of[i].begin(), of[i].end());
    }
    const double threshold = threshold_for(all, s.kept[static_cast<std::size_t>(l)]);
    e.thresholds.push_back(threshold);
    for (std::size_t i = 0; i < of.size(); ++i) {
      if (l + 1 == count) e.last[i] = of[i];
      Rows next;
      const Level& level = c.levels[static_cast<std::size_t>(l)];
      for (std::size_t n = 0; n < of[i].size(); ++n) {
        if (threshold != 0.0 && !(of[i][n] > threshold)) continue;
        const auto node = static_cast<std::size_t>(e.frontiers[i].back()[n]);
        for (int child = level.first[node]; child < level.first[node + 1]; ++child) next.push_back(child);
      }
      e.frontiers[i].push_back(std::move(next));
    }
  }
  return e;
}

struct Outcome {
  Rows rows, counts;  // [tokens, Hkv, capacity], [tokens, Hkv]
};

/// One level of all heads on the device.
struct LevelOnDevice {
  OnDevice<std::byte> rows;
  OnDevice<ClusterNode> nodes;
};
LevelOnDevice upload(const Case& c, const Level& level) {
  const Shape& s = c.shape;
  const std::int64_t bytes = cluster_row_bytes(s.dim, s.kind) * level.nodes();
  std::vector<std::byte> rows(static_cast<std::size_t>(s.kv_heads * bytes));
  std::vector<ClusterNode> nodes;
  for (int h = 0; h < s.kv_heads; ++h) {
    const auto some = [&](const auto& all, int each) {
      return std::span(all).subspan(static_cast<std::size_t>(h * level.nodes() * each),
                                    static_cast<std::size_t>(level.nodes() * each));
    };
    if (s.kind == CentroidKind::f16) {
      pack_cluster_rows(some(level.halves, s.dim), s.dim, rows.data() + h * bytes);
    } else {
      ByteCentroids from = {.centroids = some(level.centroids, s.dim), .scales = some(level.scales, 1)};
      if (s.kind == CentroidKind::q8_spreads)
        from.spreads = some(level.spreads, (s.dim + 1) / 2),
        from.spread_scales = some(level.spread_scales, 1);
      pack_cluster_rows(from, s.dim, rows.data() + h * bytes);
    }
    for (int i = 0; i <= level.nodes(); ++i) {
      const auto at = static_cast<std::size_t>(i), own = static_cast<std::size_t>(h * level.nodes() + i);
      const bool coded = i < level.nodes() && s.kind != CentroidKind::f16;
      nodes.push_back({coded ? level.scales[own] : 1.0f, coded ? std::sqrt(level.spread_scales[own]) : 0.0f,
                       i < level.nodes() ? level.keys[at] : 0, level.first[at]});
    }
  }
  return {OnDevice<std::byte>(rows), OnDevice<ClusterNode>(nodes)};
}

/// Nodes of one level below the coarsest nodes i, i + ranks, ..., at most.
int most_entries(const Case& c, int ranks) {
  int most = (c.top.back() + ranks - 1) / ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    Rows nodes;
    for (int i = rank; i < c.top.back(); i += ranks) nodes.push_back(i);
    for (std::size_t l = 0; l + 1 < c.levels.size(); ++l) {
      Rows next;
      for (const int node : nodes)
        for (int child = c.levels[l].first[static_cast<std::size_t>(node)];
             child < c.levels[l].first[static_cast<std::size_t>(node) + 1]; ++child)
          next.push_back(child);
      nodes = next;
      most = std::max(most, static_cast<int>(nodes.size()));
    }
  }
  return most;
}

/// Tokens [begin, begin + count) by themselves.
Outcome run(const Case& c, const Expected& e, std::int64_t capacity, int begin = 0, int count = 1 << 30) {
  const Shape& s = c.shape;
  count = std::min(count, s.tokens);
  std::vector<QueryToken> places;
  for (int t = begin; t < begin + count; ++t)
    places.push_back({0, kSink + c.counted_keys + kBehind + kWindow - 1 + t});
  std::vector<ClusterStep> steps;
  for (const double threshold : e.thresholds)
    steps.push_back({threshold, c.part_count, kSink, kSink + c.counted_keys, s.adds ? 1 : 0});
  Rows keys, top;
  for (int h = 0; h < s.kv_heads; ++h) {
    keys.insert(keys.end(), c.rows[static_cast<std::size_t>(h)].begin(),
                c.rows[static_cast<std::size_t>(h)].end());
    top.insert(top.end(), c.top.begin(), c.top.end());
  }
  std::vector<LevelOnDevice> levels;
  for (const Level& level : c.levels) levels.push_back(upload(c, level));
  Stream stream;
  const std::ptrdiff_t each = std::ptrdiff_t{s.query_heads} * s.dim;
  const OnDevice<float> q(
      std::vector<float>(c.q.begin() + begin * each, c.q.begin() + (begin + count) * each)),
      scales(std::vector<float>(static_cast<std::size_t>(s.kv_heads), 1.0f));
  const OnDevice<std::int32_t> keys_there(keys), top_there(top),
      out(Rows(static_cast<std::size_t>(count * s.kv_heads * capacity), -7)),
      counts(Rows(static_cast<std::size_t>(count * s.kv_heads), -7));
  const OnDevice<QueryToken> tokens(places);
  const OnDevice<ClusterStep> step(steps);
  const Queries queries = {.tokens = tokens.get(),
                           .layout = {s.kv_heads, s.dim, DType::bf16, 0},
                           .count = count,
                           .query_heads = s.query_heads,
                           .scale = 1.0f / std::sqrt(static_cast<float>(s.dim)),
                           .q = q.get()};
  ClusterLevelsTask task = {.choice = {.tables = {.kind = s.kind,
                                                  .scales = scales.get(),
                                                  .rows = keys_there.get(),
                                                  .nodes = top_there.get(),
                                                  .most_keys = static_cast<std::int64_t>(c.rows[0].size()),
                                                  .most_parts = static_cast<int>(s.parts.size())},
                                       .step = step.get(),
                                       .stretch = s.stretch,
                                       .squares = s.squares,
                                       .listed = s.stretch,
                                       .window = kWindow,
                                       .rows = out.get(),
                                       .counts = counts.get(),
                                       .capacity = capacity},
                            .levels = static_cast<int>(c.levels.size())};
  for (const int ranks : cluster_level_ranks(s.kv_heads)) {
    task.ranks = ranks, task.most_entries = most_entries(c, ranks);
    if (fits_cluster_levels(task.most_entries, s.dim)) break;
  }
  for (std::size_t l = 0; l < levels.size(); ++l)
    task.level[l] = {levels[l].rows.get(), levels[l].nodes.get(), c.levels[l].nodes()};
  choose_clusters_of_levels(task, queries, stream.get());
  return {out.read(stream), counts.read(stream)};
}

void check_case(const Case& c, const std::string& what) {
  const Shape& s = c.shape;
  const Expected e = expect(c);
  const std::int64_t capacity = std::ssize(c.rows[0]) + kBehind + s.tokens + 5;
  const Outcome out = run(c, e, capacity);
  const double margin = s.kind == CentroidKind::f16 ? 1e-4 : 4e-4 * std::max(1.0f, s.width);
  const Level& finest = c.levels.back();
  for (int t = 0; t < s.tokens; ++t) {
    for (int h = 0; h < s.kv_heads; ++h) {
      const auto own = static_cast<std::size_t>(t / s.stretch * s.kv_heads + h);
      const std::int64_t list = std::int64_t{t} * s.kv_heads + h;
      const std::int32_t count = out.counts[static_cast<std::size_t>(list)], others = kBehind + t;
      if (count < others || count > capacity) {
        test::fail(__FILE__, __LINE__, what + ": a count of " + std::to_string(count));
        continue;
      }
      const auto begin = out.rows.begin() + list * capacity;
      std::vector<int> seen(c.rows[0].size(), 0);
      bool good = true;
      for (int i = 0; i < count - others; ++i)
        good = good && begin[i] >= kSink && begin[i] < kSink + c.counted_keys &&
               seen[static_cast<std::size_t>(begin[i] - kSink)]++ == 0;
      for (int i = 0; i < others; ++i) good = good && begin[count - others + i] == kSink + c.counted_keys + i;
      const Rows& frontier = e.frontiers[own][c.levels.size() - 1];
      int listed = 0;
      for (std::size_t n = 0; good && n < frontier.size(); ++n) {
        const auto node = static_cast<std::size_t>(frontier[n]);
        const int from = finest.first[node], to = finest.first[node + 1];
        int found = 0;
        for (int k = from; k < to; ++k)
          found += seen[static_cast<std::size_t>(
              c.rows[static_cast<std::size_t>(h)][static_cast<std::size_t>(k)] - kSink)];
        listed += found;
        const double w = e.last[own][n], threshold = e.thresholds.back();
        const bool above = threshold == 0.0 || w > threshold * (1 + margin),
                   below = threshold > 0.0 && w < threshold * (1 - margin);
        good = (found == 0 && !above) || (found == to - from && !below);
      }
      if (!good || listed != count - others)  // none below a pruned node
        test::fail(__FILE__, __LINE__,
                   what + ": rows of token " + std::to_string(t) + ", head " + std::to_string(h));
    }
  }
}

LODE_TEST(cluster_levels_keep_what_is_above_their_thresholds) {
  LODE_NEEDS(can_choose_buckets());
  constexpr int kAll = 1 << 30;
  const struct {
    Shape shape;
    const char* what;
  } cases[] = {{{32, 8, 128, {600}, {5, 20}}, "an eighth of a model"},
               {{32, 8, 128, {300, 20, 3}, {5, 9}, 5, 1}, "three parts, five tokens apart"},
               {{32, 8, 64, {50, 9}, {5, 9}, 21, 21}, "21 tokens together"},
               {{8, 2, 64, {40}, {4, 7}, 7, 3}, "stretches of 3, the last one short"},
               {{8, 2, 64, {75, 7, 7, 7}, {3, 9}, 1, 1, 2}, "two of four parts count"},
               {{8, 2, 64, {75}, {3, 9}, 3, 3, 0}, "no part counts"},
               {{32, 32, 128, {130}, {5, 9}}, "a head each"},
               {{16, 1, 80, {33}, {6, 9}, 2, 2}, "group of 16, d 80"},
               {{30, 10, 96, {30}, {5, 3}, 3, 2}, "ten groups of 3, d 96"},
               {{4, 4, 256, {29}, {5, 9}}, "d 256"},
               {{2, 1, 20, {1}, {1, 5}}, "one node a level, d 20"},
               {{8, 2, 64, {30}, {5, 9}, 2, 2, kAll, {1.0, 1.0}}, "everything"},
               {{8, 2, 64, {30}, {5, 9}, 2, 2, kAll, {1.0, 0.1}}, "everything at the top"},
               {{8, 2, 64, {30}, {4, 4, 9}, 2, 1, kAll, {0.5, 0.4, 0.2}}, "three levels"},
               {{8, 2, 128, {9, 3}, {4, 3, 2, 5}, 2, 2, kAll, {0.7, 0.6, 0.5, 0.3}}, "four levels"},
               {{8, 2, 64, {60}, {5, 9}, 2, 1, kAll, {0.1, 0.05}, 8.0f, true}, "squares, logits of tens"}};
  unsigned seed = 1;
  for (const auto& one : cases) {
    for (const CentroidKind kind : {CentroidKind::f16, CentroidKind::q8, CentroidKind::q8_spreads}) {
      Shape shape = one.shape;
      shape.kind = kind;
      check_case(make_case(shape, seed),
                 std::string(one.what) + ", kind " + std::to_string(static_cast<int>(kind)));
    }
    ++seed;
  }
  Shape unasked = {8, 2, 64, {50, 9}, {5, 9}, 5, 5};
  unasked.kind = CentroidKind::q8_spreads, unasked.adds = false;
  check_case(make_case(unasked, 76), "spreads that nobody asks for");
  Case bad = make_case({8, 2, 64, {50}, {5, 9}, 2, 2}, 77);
  bad.q[5] = std::numeric_limits<float>::quiet_NaN();
  bad.q[64 * 4 + 1] = -std::numeric_limits<float>::infinity();
  check_case(bad, "two queries that are not numbers");
}

LODE_TEST(cluster_levels_that_keep_nothing_list_what_is_behind) {
  LODE_NEEDS(can_choose_buckets());
  const Case c = make_case({8, 2, 64, {50}, {5, 9}, 2, 2}, 5);
  Expected none = expect(c);
  for (const std::size_t level : {std::size_t{0}, std::size_t{1}}) {
    none.thresholds[level] = 1e30;
    const Outcome out = run(c, none, 5000);
    LODE_CHECK((out.counts == Rows{kBehind, kBehind, kBehind + 1, kBehind + 1}));
  }
}

// Again, and token by token: a choice does not depend on what else is chosen.
LODE_TEST(cluster_levels_give_the_same_bits_whatever_the_batch) {
  LODE_NEEDS(can_choose_buckets());
  for (const CentroidKind kind : {CentroidKind::f16, CentroidKind::q8, CentroidKind::q8_spreads}) {
    Shape shape = {32, 8, 128, {300, 10}, {5, 12}, 5, 1};
    shape.kind = kind;
    const Case c = make_case(shape, 5);
    const Expected e = expect(c);
    const std::int64_t capacity = std::ssize(c.rows[0]) + kBehind + shape.tokens + 5;
    const Outcome once = run(c, e, capacity), again = run(c, e, capacity);
    LODE_CHECK(once.rows == again.rows && once.counts == again.counts);
    for (int t = 0; t < shape.tokens; ++t) {
      const Outcome alone = run(c, e, capacity, t, 1);
      LODE_CHECK(
          std::equal(alone.counts.begin(), alone.counts.end(), once.counts.begin() + t * shape.kv_heads));
      LODE_CHECK(std::equal(alone.rows.begin(), alone.rows.end(),
                            once.rows.begin() + t * shape.kv_heads * capacity));
    }
  }
}

}  // namespace
}  // namespace lode::cuda
