// SPDX-License-Identifier: Apache-2.0
// Clusters above a threshold, against the formula in float64: every node that is clearly above is attended
// with all of its keys, none that is clearly below; keys behind the index; several tokens that choose
// together; queries that are not numbers; nothing indexed, everything kept; centroids in 16 bits, in 8, and
// in 8 with spreads.
#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/saap/probe.h"
#include "kernels/cuda/squeezed/cluster_block.h"
#include "kernels/cuda/squeezed/clusters.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;

struct Shape {
  int query_heads, kv_heads, dim;
  std::vector<int> parts;  // nodes of each, all heads
  int keys;                // of one node on average
  int tokens = 1, stretch = 1;
  int counted = 1 << 30;  // parts that count
  double kept = 0.1;      // share of nodes above the threshold; 1: threshold 0
  float width = 1.0f;     // of the centroids
  float centroid_scale = 1.0f;
  bool squares = false;
  CentroidKind kind = CentroidKind::f16;
  bool block = false;    // all tokens choose together, by choose_clusters_for_block
  bool adds = true;      // scores add the spreads that there are
  int heads_a_turn = 0;  // whose exponentials a block stores
};

struct Case {
  Shape shape;
  std::vector<std::uint16_t> halves;          // [Hkv, nodes, d]
  std::vector<std::byte> centroids, spreads;  // [Hkv, nodes, d] in place of them, [Hkv, nodes, planes]
  std::vector<float> scales, spread_scales;   // [Hkv, nodes]
  std::vector<float> q;                       // [tokens, Hq, d]
  std::vector<Rows> first, rows;              // [Hkv][nodes + 1], [Hkv][keys]
  int nodes = 0, keys = 0, counted_nodes = 0, counted_keys = 0, part_count = 0;
};

constexpr int kSink = 3, kWindow = 20, kBehind = 17;  // keys between the index and the window

/// Sizes are uneven, one node of each part has a fifth of its keys; all heads have the same sizes.
Case make_case(const Shape& s, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Case c = {.shape = s};
  Rows sizes;
  std::vector<int> ends = {0};
  for (const int nodes : s.parts) {
    for (int i = 0; i < nodes; ++i)
      sizes.push_back(i == nodes / 3 ? 1 + nodes * s.keys / 5
                                     : 1 + static_cast<int>(random() % (2 * s.keys)));
    ends.push_back(static_cast<int>(sizes.size()));
  }
  c.nodes = static_cast<int>(sizes.size());
  c.part_count = std::min<int>(s.counted, static_cast<int>(s.parts.size()));
  c.counted_nodes = ends[static_cast<std::size_t>(c.part_count)];
  for (int i = 0; i < c.nodes; ++i) {
    if (i == c.counted_nodes) c.counted_keys = c.keys;
    c.keys += sizes[static_cast<std::size_t>(i)];
  }
  if (c.counted_nodes == c.nodes) c.counted_keys = c.keys;
  for (int h = 0; h < s.kv_heads; ++h) {
    Rows first = {0}, rows(static_cast<std::size_t>(c.keys));
    for (const int size : sizes) first.push_back(first.back() + size);
    for (int i = 0; i < c.keys; ++i) rows[static_cast<std::size_t>(i)] = kSink + i;
    for (std::size_t part = 0; part < s.parts.size(); ++part)  // keys of a part, in any order
      std::shuffle(rows.begin() + first[static_cast<std::size_t>(ends[part])],
                   rows.begin() + first[static_cast<std::size_t>(ends[part + 1])], random);
    c.first.push_back(first);
    c.rows.push_back(rows);
    for (int i = 0; i < c.nodes * s.dim; ++i) c.halves.push_back(to_f16(s.width * normal(random)).bits);
    if (s.kind == CentroidKind::f16) continue;
    const auto bytes = [&](std::vector<std::byte>& to, int width, int least) {
      for (int i = 0; i < c.nodes * width; ++i)
        to.push_back(static_cast<std::byte>(least + static_cast<int>(random() % (128 - least))));
    };
    bytes(c.centroids, s.dim, -127), bytes(c.spreads, (s.dim + 1) / 2, 0);
    for (int i = 0; i < c.nodes; ++i) {
      c.scales.push_back(s.width / 73.0f * (0.5f + static_cast<float>(random() % 100) / 100.0f));
      // From none to deviations of several: a mean of exponentials of few keys bends before that.
      c.spread_scales.push_back(i % 7 == 0 ? 0.0f : s.width * static_cast<float>(random() % 100) / 300.0f);
    }
  }
  for (int i = 0; i < s.tokens * s.query_heads * s.dim; ++i) c.q.push_back(normal(random));
  return c;
}

/// The logit of a node, in float64.
double logit(const Case& c, const float* q, int h, std::size_t node) {
  const Shape& s = c.shape;
  const double scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
  const std::size_t row = static_cast<std::size_t>(h * c.nodes) + node, d = static_cast<std::size_t>(s.dim);
  double z = 0.0, variance = 0.0;
  for (std::size_t j = 0; j < d; ++j) {
    const double own = scale * q[j];
    if (s.kind == CentroidKind::f16) {
      z += own * to_float(f16{c.halves[row * d + j]});
      continue;
    }
    z += own * static_cast<signed char>(c.centroids[row * d + j]) * c.scales[row];
    const std::size_t planes = (d + 1) / 2;
    variance += own * own * static_cast<signed char>(c.spreads[row * planes + j % planes]) *
                static_cast<double>(c.spread_scales[row]);
  }
  z *= s.centroid_scale;
  const Rows& first = c.first[static_cast<std::size_t>(h)];
  if (s.kind != CentroidKind::q8_spreads || !s.adds || first[node + 1] - first[node] < 2) return z;
  const double deviation = std::sqrt(variance),
               most = std::sqrt(2.0 * std::log(first[node + 1] - first[node])),
               below = std::min(deviation, most);
  return z + below * (deviation - below / 2.0);
}

/// Mean (or root of the mean square) of K exp / sum over the queries of tokens [begin, end), for each counted
/// node, in float64.
std::vector<double> weights(const Case& c, int begin, int end, int h) {
  const Shape& s = c.shape;
  const int group = s.query_heads / s.kv_heads;
  std::vector<double> sum(static_cast<std::size_t>(c.counted_nodes), 0.0);
  for (int t = begin; t < end; ++t) {
    for (int g = 0; g < group; ++g) {
      const float* const q = c.q.data() + (t * s.query_heads + h * group + g) * s.dim;
      if (std::any_of(q, q + s.dim, [](float x) { return !std::isfinite(x); })) continue;
      std::vector<double> z(sum.size(), 0.0);
      for (std::size_t i = 0; i < z.size(); ++i) z[i] = logit(c, q, h, i);
      const double most = z.empty() ? 0.0 : *std::max_element(z.begin(), z.end());
      double total = 0.0;
      for (std::size_t i = 0; i < z.size(); ++i) {
        const Rows& first = c.first[static_cast<std::size_t>(h)];
        total += (first[i + 1] - first[i]) * std::exp(z[i] - most);
      }
      for (std::size_t i = 0; i < z.size(); ++i)
        sum[i] += std::pow(std::exp(z[i] - most) / total * c.counted_keys, s.squares ? 2 : 1) /
                  ((end - begin) * group);
    }
  }
  for (double& x : sum) x = s.squares ? std::sqrt(x) : x;
  return sum;
}

struct Outcome {
  Rows rows, counts;  // [tokens, Hkv, capacity], [tokens, Hkv]
};

/// Nodes [from, from + count) of all heads' as nodes `at`, ... of one head.
void pack(const Case& c, int from, int count, int at, std::byte* to) {
  const int d = c.shape.dim;
  const auto some = [&](const auto& all, int each) {
    return std::span(all).subspan(static_cast<std::size_t>(from * each),
                                  static_cast<std::size_t>(count * each));
  };
  if (c.shape.kind == CentroidKind::f16) return pack_centroids(some(c.halves, d), d, at, to);
  ByteCentroids nodes = {.centroids = some(c.centroids, d), .scales = some(c.scales, 1)};
  if (c.shape.kind == CentroidKind::q8_spreads)
    nodes.spreads = some(c.spreads, (d + 1) / 2), nodes.spread_scales = some(c.spread_scales, 1);
  pack_centroids(nodes, d, at, to);
}

Outcome run(const Case& c, double threshold, std::int64_t capacity) {
  const Shape& s = c.shape;
  const std::int64_t bytes = centroid_bytes(c.nodes, s.dim, s.kind);
  std::vector<std::byte> packed(static_cast<std::size_t>(s.kv_heads * bytes));
  Rows first, rows, nodes;
  for (int h = 0; h < s.kv_heads; ++h) {
    int at = 0;
    nodes.push_back(0);
    for (const int part : s.parts) {  // packed part by part, as an index grows
      pack(c, h * c.nodes + at, part, at, packed.data() + h * bytes);
      nodes.push_back(at += part);
    }
    const auto own = static_cast<std::size_t>(h);
    first.insert(first.end(), c.first[own].begin(), c.first[own].end());
    rows.insert(rows.end(), c.rows[own].begin(), c.rows[own].end());
  }
  std::vector<QueryToken> places;
  for (int t = 0; t < s.tokens; ++t)
    places.push_back({0, kSink + c.counted_keys + kBehind + kWindow - 1 + t});
  Stream stream;
  const OnDevice<std::byte> centroids(packed);
  const OnDevice<float> q(c.q),
      scales(std::vector<float>(static_cast<std::size_t>(s.kv_heads), s.centroid_scale));
  const OnDevice<std::int32_t> first_there(first), rows_there(rows), nodes_there(nodes),
      out(Rows(static_cast<std::size_t>(s.tokens * s.kv_heads * capacity), -7)),
      counts(Rows(static_cast<std::size_t>(s.tokens * s.kv_heads), -7));
  const OnDevice<QueryToken> tokens(places);
  const OnDevice<ClusterStep> step(
      {{threshold, c.part_count, kSink, kSink + c.counted_keys, s.adds ? 1 : 0}});
  const Queries queries = {.tokens = tokens.get(),
                           .layout = {s.kv_heads, s.dim, DType::bf16, 0},
                           .count = s.tokens,
                           .query_heads = s.query_heads,
                           .scale = 1.0f / std::sqrt(static_cast<float>(s.dim)),
                           .q = q.get()};
  const ClusterChoiceTask task = {.tables = {.kind = s.kind,
                                             .centroids = centroids.get(),
                                             .scales = scales.get(),
                                             .first = first_there.get(),
                                             .rows = rows_there.get(),
                                             .nodes = nodes_there.get(),
                                             .most_keys = c.keys,
                                             .most_nodes = c.nodes,
                                             .most_parts = static_cast<int>(s.parts.size())},
                                  .step = step.get(),
                                  .stretch = s.stretch,
                                  .squares = s.squares,
                                  .listed = s.block ? 1 : s.stretch,
                                  .window = kWindow,
                                  .rows = out.get(),
                                  .counts = counts.get(),
                                  .capacity = capacity};
  if (s.block) {
    const BlockScratch at(s.tokens, s.query_heads, s.kv_heads, s.dim, c.nodes, s.kind);
    const OnDevice<char> scratch(std::vector<char>(static_cast<std::size_t>(at.bytes), char{-1}));
    choose_clusters_for_block(task, queries, s.adds, scratch.get(), stream.get(), s.heads_a_turn);
    return {out.read(stream), counts.read(stream)};
  }
  choose_clusters(task, queries, stream.get());
  return {out.read(stream), counts.read(stream)};
}

/// Which nodes one list holds; all rows valid, once, nodes whole, and the keys behind the index last.
std::vector<char> nodes_of(const Case& c, const Outcome& out, int token, int h, std::int64_t capacity,
                           const char* what) {
  const std::int64_t list = std::int64_t{token} * c.shape.kv_heads + h;
  const std::int32_t count = out.counts[static_cast<std::size_t>(list)], others = kBehind + token;
  const Rows& first = c.first[static_cast<std::size_t>(h)];
  const Rows& rows = c.rows[static_cast<std::size_t>(h)];
  std::vector<char> kept(static_cast<std::size_t>(c.counted_nodes), 0);
  if (count < others || count > capacity) {
    test::fail(__FILE__, __LINE__, std::string(what) + ": a count of " + std::to_string(count));
    return kept;
  }
  const auto at = [&](int i) { return out.rows[static_cast<std::size_t>(list * capacity + i)]; };
  bool good = true;
  int i = 0;
  for (int node = 0; node < c.counted_nodes && i < count - others; ++node) {  // nodes in their order
    const int from = first[static_cast<std::size_t>(node)], to = first[static_cast<std::size_t>(node) + 1];
    if (from == to || at(i) != rows[static_cast<std::size_t>(from)]) continue;
    kept[static_cast<std::size_t>(node)] = 1;
    for (int k = from; k < to; ++k, ++i)
      good = good && i < count - others && at(i) == rows[static_cast<std::size_t>(k)];
  }
  good = good && i == count - others;
  for (int k = 0; good && k < others; ++k) good = at(i + k) == kSink + c.counted_keys + k;
  if (!good) test::fail(__FILE__, __LINE__, std::string(what) + ": rows of token " + std::to_string(token));
  return kept;
}

/// Above which `kept` of the nodes are, those of the first stretch.
double threshold_of(const Case& c) {
  const Shape& s = c.shape;
  std::vector<double> all;
  for (int h = 0; h < s.kv_heads; ++h) {
    const std::vector<double> w = weights(c, 0, std::min(s.stretch, s.tokens), h);
    all.insert(all.end(), w.begin(), w.end());
  }
  if (s.kept >= 1.0 || all.empty()) return 0.0;
  const auto nth =
      all.begin() + static_cast<std::ptrdiff_t>((1.0 - s.kept) * static_cast<double>(all.size() - 1));
  std::nth_element(all.begin(), nth, all.end());
  return *nth;
}

void check_case(const Case& c, double threshold, const char* what) {
  const Shape& s = c.shape;
  const std::int64_t capacity = c.keys + kBehind + s.tokens + 5;
  const Outcome out = run(c, threshold, capacity);
  // Queries have 16 bits beside whole numbers, 11 in blocks, where squares and variances have 8; logits of
  // `width` times some.
  const double margin = s.block                       ? (s.kind == CentroidKind::q8_spreads ? 1e-2 : 5e-3)
                        : s.kind == CentroidKind::f16 ? 1e-4
                                                      : 4e-4 * std::max(1.0f, s.width);
  for (int begin = 0; begin < s.tokens; begin += s.stretch) {
    const int end = std::min(s.tokens, begin + s.stretch);
    for (int h = 0; h < s.kv_heads; ++h) {
      const std::vector<double> w = weights(c, begin, end, h);
      for (int t = begin; t < (s.block ? 1 : end); ++t) {
        const std::vector<char> kept = nodes_of(c, out, t, h, capacity, what);
        for (std::size_t i = 0; i < w.size(); ++i) {
          const Rows& first = c.first[static_cast<std::size_t>(h)];
          if (first[i] == first[i + 1]) continue;
          const bool above = threshold == 0.0 || w[i] > threshold * (1 + margin);
          const bool below = threshold > 0.0 && w[i] < threshold * (1 - margin);
          if ((above && !kept[i]) || (below && kept[i]))
            test::fail(__FILE__, __LINE__,
                       std::string(what) + ": node " + std::to_string(i) + " of " + std::to_string(w[i]) +
                           " against " + std::to_string(threshold));
        }
      }
    }
  }
}

void check_case(const Case& c, const char* what) {
  check_case(c, threshold_of(c), what);
}

LODE_TEST(choose_clusters_keeps_what_is_above_the_threshold) {
  LODE_NEEDS(can_choose_buckets());
  const struct {
    Shape shape;
    const char* what;
  } cases[] = {{{32, 8, 128, {6554}, 20}, "an eighth of a model, 128k"},
               {{32, 8, 128, {6554, 40, 7}, 20, 5, 1}, "three parts, five tokens apart"},
               {{32, 8, 128, {700, 40, 7}, 20, 32, 32}, "32 tokens together"},
               {{32, 8, 128, {700, 40}, 20, 41, 41}, "41 tokens together"},
               {{32, 8, 128, {700}, 20, 30, 8}, "stretches of 8, the last one short"},
               {{8, 2, 64, {77}, 9, 7, 3}, "stretches of 3"},
               {{8, 2, 64, {75, 7, 7, 7}, 20, 1, 1, 2}, "two of four parts count"},
               {{8, 2, 64, {75}, 20, 3, 3, 0}, "no part counts"},
               {{32, 32, 128, {1300}, 20}, "a head each"},
               {{16, 1, 80, {333}, 20, 2, 2}, "group of 16, d 80"},
               {{6, 2, 96, {16}, 3, 3, 2}, "group of 3, d 96"},
               {{4, 4, 256, {129}, 20}, "d 256"},
               {{2, 1, 20, {1}, 5}, "one node, d 20"},
               {{8, 2, 64, {300}, 20, 4, 4, 1 << 30, 1.0}, "everything"},
               {{8, 2, 64, {300}, 20, 1, 1, 1 << 30, 0.01, 25.0f}, "sharp: logits of tens"},
               {{8, 2, 64, {300}, 20, 1, 1, 1 << 30, 0.1, 1e-4f, 4096.0f}, "scaled halves"},
               {{32, 8, 128, {700, 40}, 20, 41, 41, 1 << 30, 0.1, 1.0f, 1.0f, true}, "squares, 41 together"},
               {{8, 2, 64, {300}, 20, 3, 1, 1 << 30, 0.1, 25.0f, 1.0f, true}, "squares, sharp"},
               {{6, 2, 96, {160}, 3, 7, 3, 1 << 30, 0.1, 1.0f, 1.0f, true}, "squares, stretches of 3"}};
  unsigned seed = 1;
  for (const auto& one : cases) {
    for (const CentroidKind kind : {CentroidKind::f16, CentroidKind::q8, CentroidKind::q8_spreads}) {
      Shape shape = one.shape;
      shape.kind = kind;
      const std::string what = std::string(one.what) + ", kind " + std::to_string(static_cast<int>(kind));
      check_case(make_case(shape, seed), what.c_str());
    }
    ++seed;
  }
  Shape unasked = {32, 8, 128, {700, 40}, 20, 9, 4};
  unasked.kind = CentroidKind::q8_spreads, unasked.adds = false;
  check_case(make_case(unasked, 76), "spreads that nobody asks for");
  Case bad = make_case({8, 2, 64, {200}, 20, 2, 2}, 77);
  bad.q[5] = std::numeric_limits<float>::quiet_NaN();
  bad.q[64 * 4 + 1] = -std::numeric_limits<float>::infinity();
  check_case(bad, "two queries that are not numbers");
  Case equal = make_case({8, 2, 64, {200}, 20}, 78);
  std::fill(equal.q.begin(), equal.q.end(), 0.0f);
  check_case(equal, "all scores equal");  // none is above the others
}

/// What the formula keeps, exponentials made twice, stored a head at a time or of all heads.
void check_block(Case c, double threshold, const char* what) {
  c.shape.block = true;
  for (const int heads : {0, 1, c.shape.kv_heads}) {
    c.shape.heads_a_turn = heads;
    check_case(c, threshold, what);
  }
}
/// And twice the same bits, however many heads a turn.
void check_block(Case c, const char* what) {
  check_block(c, threshold_of(c), what);
  c.shape.block = true;
  const std::int64_t capacity = c.keys + kBehind + c.shape.tokens + 5;
  for (const auto& [first, second] : {std::pair{0, 0}, {1, 1}, {1, c.shape.kv_heads}}) {
    c.shape.heads_a_turn = first;
    const Outcome once = run(c, 1.1, capacity);
    c.shape.heads_a_turn = second;
    const Outcome again = run(c, 1.1, capacity);
    LODE_CHECK(once.rows == again.rows && once.counts == again.counts);
  }
}

LODE_TEST(choose_clusters_for_a_block) {
  constexpr int kAll = 1 << 30;
  constexpr CentroidKind kBytes = CentroidKind::q8, kSpreads = CentroidKind::q8_spreads;
  const struct {
    Shape shape;
    const char* what;
  } cases[] = {
      {{8, 8, 128, {300}, 9, 65, 65}, "a head each"},
      {{16, 4, 128, {200, 40, 7}, 9, 70, 70}, "three parts, 280 queries"},
      {{8, 1, 64, {333}, 9, 33, 33}, "group of 8, d 64"},
      {{6, 2, 64, {1}, 5, 40, 40}, "one node"},
      {{8, 2, 64, {75, 7, 7, 7}, 20, 50, 50, 2}, "two of four parts count"},
      {{8, 2, 64, {75}, 20, 33, 33, 0}, "no part counts"},
      {{8, 2, 64, {300}, 20, 64, 64, kAll, 1.0}, "everything"},
      {{4, 2, 128, {257}, 9, 129, 129, kAll, 0.1, 1e-4f, 4096.0f}, "scaled halves"},
      {{4, 2, 128, {600}, 5, 65, 65, kAll, 0.1, 1.0f, 1.0f, true}, "squares"},
      {{4, 2, 64, {300}, 20, 41, 41, kAll, 0.1, 8.0f, 1.0f, true}, "squares, logits of tens"},
      {{4, 2, 128, {300, 41}, 9, 70, 70, kAll, 0.1, 1.0f, 1.0f, true, kBytes}, "8 bits"},
      {{8, 2, 64, {300}, 9, 70, 70, kAll, 0.1, 3.0f, 1.0f, false, kBytes}, "8 bits, d 64"},
      {{8, 8, 128, {300}, 9, 65, 65, kAll, 0.1, 1.0f, 1.0f, true, kSpreads}, "spreads"},
      {{16, 4, 128, {700, 40, 7}, 20, 150, 150, kAll, 0.1, 1.0f, 1.0f, true, kSpreads},
       "spreads, three parts, 600 queries"},
      {{8, 1, 64, {333, 41}, 9, 70, 70, kAll, 0.1, 1.0f, 1.0f, true, kSpreads}, "spreads, d 64"},
      {{8, 2, 64, {75, 7, 7, 7}, 20, 50, 50, 2, 0.1, 1.0f, 1.0f, false, kSpreads},
       "spreads, two of four parts, means"},
      {{6, 2, 64, {1}, 5, 40, 40, kAll, 0.1, 1.0f, 1.0f, true, kSpreads}, "spreads, one node"},
      {{8, 2, 128, {130}, 1, 33, 33, kAll, 0.1, 1.0f, 1.0f, true, kSpreads}, "spreads, a key or two"},
      {{4, 2, 128, {300}, 20, 65, 65, kAll, 0.1, 6.0f, 1.0f, true, kSpreads},
       "spreads, logits of tens, all behind the bend"}};
  LODE_NEEDS(can_choose_buckets());
  LODE_CHECK(can_choose_for_block(64) && can_choose_for_block(128) && !can_choose_for_block(80));
  unsigned seed = 1;
  for (const auto& one : cases) check_block(make_case(one.shape, seed++), one.what);
  const struct {
    float base, rise;  // of centroids' numbers, which queries see as 11 times as many; by tiles of 128 nodes
  } places[] = {{-30.0f, 0.0f}, {30.0f, 0.0f}, {0.0f, 8.0f}};
  for (const auto& [base, rise] : places) {
    Case far = make_case({4, 2, 128, {300}, 9, 65, 65, kAll, 0.1, 0.25f}, 78);
    for (std::size_t i = 0; i < far.halves.size(); ++i) {
      const auto node = static_cast<int>(i) / far.shape.dim % far.nodes;
      far.halves[i] =
          to_f16(to_float(f16{far.halves[i]}) + base + rise * static_cast<float>(node / 128)).bits;
    }
    for (float& x : far.q) x = 1.0f + x / 8.0f;
    check_block(far, "logits of hundreds");
  }
  Case c = make_case({8, 2, 64, {200}, 20, 50, 50}, 77);
  c.q[5] = std::numeric_limits<float>::quiet_NaN();
  c.q[static_cast<std::size_t>(c.shape.dim * c.shape.query_heads) + 1] =
      -std::numeric_limits<float>::infinity();
  check_block(c, "two queries that are not numbers");
}

LODE_TEST(choose_clusters_for_a_block_with_spreads_that_hurt) {
  LODE_NEEDS(can_choose_for_block(128));
  Shape shape = {8, 4, 128, {300, 41}, 20, 70, 70};
  shape.squares = true, shape.kind = CentroidKind::q8_spreads;
  const auto all = [](auto& numbers, float by) {
    for (auto& x : numbers) x *= by;
  };
  Case none = make_case(shape, 31);
  all(none.spread_scales, 0.0f);
  check_block(none, "no spreads");
  Case below = make_case(shape, 32);
  all(below.spread_scales, 1e-2f);
  check_block(below, "all below the bend");

  for (const float by : {1e-4f, 100.0f}) {  // the same logits of other numbers
    Case units = make_case(shape, 33);
    all(units.q, by), all(units.scales, 1.0f / by), all(units.spread_scales, 1.0f / by / by);
    check_block(units, "other units");
  }
  Case uneven = make_case(shape, 34);  // one query is far larger than the others
  for (int j = 0; j < shape.dim; ++j) uneven.q[static_cast<std::size_t>(j)] *= 1e6f;
  check_block(uneven, "a huge query");
  uneven.q[7] = std::numeric_limits<float>::infinity();
  check_block(uneven, "an infinite query");

  Case huge = make_case(shape, 35);  // one node of each head gets all there is
  for (std::size_t i = 5; i < huge.spread_scales.size(); i += static_cast<std::size_t>(huge.nodes))
    huge.spread_scales[i] = 1e30f;
  check_block(huge, 0.5, "a huge variance");

  Case unasked = make_case(shape, 37);
  unasked.shape.adds = false;
  check_block(unasked, "spreads that nobody asks for");

  Case empty = make_case(shape, 36);  // every fifth node's keys are its neighbour's
  for (Rows& first : empty.first)
    for (std::size_t i = 0; i + 2 < first.size(); i += 5) first[i + 1] = first[i];
  check_block(empty, "empty nodes");
}

LODE_TEST(choose_clusters_gives_the_same_bits_again) {
  LODE_NEEDS(can_choose_buckets());
  for (const CentroidKind kind : {CentroidKind::f16, CentroidKind::q8, CentroidKind::q8_spreads}) {
    Shape shape = {32, 8, 128, {3000, 100}, 20, 9, 4};
    shape.kind = kind;
    const Case c = make_case(shape, 5);
    const std::int64_t capacity = c.keys + kBehind + c.shape.tokens + 5;
    const Outcome once = run(c, 1.3, capacity), again = run(c, 1.3, capacity);
    LODE_CHECK(once.rows == again.rows && once.counts == again.counts);
  }
}

}  // namespace
}  // namespace lode::cuda
