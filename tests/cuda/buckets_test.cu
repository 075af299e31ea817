// SPDX-License-Identifier: Apache-2.0
// Buckets: lists against a plain sort; the chosen ones against the network in float64, where the margin is
// clear; keys behind the lists, empty buckets, every bucket, a head that is not a number.
#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/saap/buckets.h"
#include "kernels/cuda/saap/probe.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;

struct Shape {
  int query_heads, kv_heads, dim, hidden, buckets, planes, probes;
  std::int64_t keys, listed;
  bool softmax = true;
  bool residual = false;
  BucketRank rank = BucketRank::mass;
  int tokens = 1;
};

struct Case {
  Shape shape;
  std::vector<float> w1, b1, w2, w3, b2, q;  // [Hkv, ...], [tokens, Hq, d]
  std::vector<std::uint16_t> labels;         // [Hkv, keys]
};

Case make_case(const Shape& s, unsigned seed, float width = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& x, std::int64_t n, float by) {
    x.resize(static_cast<std::size_t>(n));
    for (float& v : x) v = by * normal(random);
  };
  Case c = {s, {}, {}, {}, {}, {}, {}, {}};
  const std::int64_t heads = s.kv_heads, mid = s.hidden > 0 ? s.hidden : s.dim;
  fill(c.w1, heads * s.hidden * s.dim, width);
  fill(c.b1, heads * s.hidden, width);
  fill(c.w2, heads * s.buckets * mid, width / std::sqrt(static_cast<float>(mid)));
  if (s.residual) {  // as loud in the scores as what comes of the hidden layer
    fill(c.w3, heads * s.buckets * s.dim, width);
    fill(c.b2, heads * s.buckets, width);
  }
  fill(c.q, std::int64_t{s.tokens} * s.query_heads * s.dim, 1.0f);
  for (std::int64_t i = 0; i < heads * s.keys; ++i)  // one bucket has a fifth of the keys, one has none
    c.labels.push_back(
        static_cast<std::uint16_t>(i % 5 == 0 ? 3 % s.buckets : 1 + random() % std::max(1, s.buckets - 1)) %
        static_cast<std::uint16_t>(s.buckets));
  return c;
}

/// y[r] += W[r] . x, rows of one head.
void add_product(const std::vector<float>& w, int head, std::size_t rows, const std::vector<double>& x,
                 std::vector<double>& y) {
  const float* at = w.data() + static_cast<std::size_t>(head) * rows * x.size();
  for (std::size_t r = 0; r < rows; ++r)
    for (const double v : x) y[r] += static_cast<double>(*at++) * v;
}

/// The network of one head, in float64.
std::vector<double> scores(const Case& c, int head, const std::vector<double>& x) {
  const Shape& s = c.shape;
  const auto buckets = static_cast<std::size_t>(s.buckets), hidden = static_cast<std::size_t>(s.hidden);
  std::vector<double> h = x, y(buckets, 0.0);
  if (s.hidden > 0) {
    const auto bias = c.b1.begin() + head * s.hidden;
    h.assign(bias, bias + s.hidden);
    add_product(c.w1, head, hidden, x, h);
    for (double& v : h) v = std::max(0.0, v);
  }
  add_product(c.w2, head, buckets, h, y);
  if (!s.residual) return y;
  add_product(c.w3, head, buckets, x, y);
  for (std::size_t b = 0; b < buckets; ++b) y[b] += c.b2[static_cast<std::size_t>(head) * buckets + b];
  return y;
}

/// What every bucket is ranked by for one query token, in float64.
std::vector<double> ranks(const Case& c, int token, int head, const std::vector<std::int64_t>& sizes) {
  const Shape& s = c.shape;
  const int group = s.query_heads / s.kv_heads;
  std::vector<double> rank(static_cast<std::size_t>(s.buckets), 0.0),
      together(static_cast<std::size_t>(s.dim), 0.0);
  for (int g = 0; g < group; ++g) {
    const auto from = c.q.begin() + ((token * s.query_heads) + head * group + g) * s.dim;
    const std::vector<double> x(from, from + s.dim);
    for (std::size_t j = 0; j < x.size(); ++j) together[j] += x[j];
    if (!s.softmax || std::any_of(x.begin(), x.end(), [](double v) { return !std::isfinite(v); })) continue;
    const std::vector<double> y = scores(c, head, x);
    const double most = *std::max_element(y.begin(), y.end());
    double total = 0.0;
    for (const double v : y) total += std::exp(v - most);
    for (std::size_t b = 0; b < y.size(); ++b) rank[b] += std::exp(y[b] - most) / total;
  }
  if (!s.softmax) rank = scores(c, head, together);
  for (std::size_t b = 0; b < rank.size(); ++b) {
    const auto size = static_cast<double>(std::max<std::int64_t>(1, sizes[b]));
    if (s.rank != BucketRank::mass) rank[b] /= s.rank == BucketRank::per_key ? size : std::sqrt(size);
  }
  return rank;
}

constexpr std::int64_t kSink = 1, kWindow = 16;

/// Lists and choice of one case, on the device and read back.
struct Outcome {
  Rows starts, lists;  // [Hkv, C + 1], [Hkv, keys]
  Rows rows, counts;   // [tokens, Hkv, keys], [tokens, Hkv]
};

/// The networks of all heads.
std::vector<std::byte> pack_nets(const Case& c, const NetLayout& net) {
  const Shape& s = c.shape;
  std::vector<std::byte> nets;
  const int mid = s.hidden > 0 ? s.hidden : s.dim;
  for (int h = 0; h < s.kv_heads; ++h) {
    const auto part = [&](const std::vector<float>& x, std::int64_t each) {
      return x.empty()
                 ? std::span<const float>()
                 : std::span(x).subspan(static_cast<std::size_t>(h * each), static_cast<std::size_t>(each));
    };
    const auto one = pack_net(net, part(c.w1, std::int64_t{s.hidden} * s.dim), part(c.b1, s.hidden),
                              part(c.w2, std::int64_t{s.buckets} * mid),
                              part(c.w3, std::int64_t{s.buckets} * s.dim), part(c.b2, s.buckets));
    nets.insert(nets.end(), one.begin(), one.end());
  }
  return nets;
}

/// Centroids of a few lengths in one direction: many buckets with the same score.
Case with_levels(Case c, std::size_t levels) {
  const auto d = static_cast<std::size_t>(c.shape.dim), buckets = static_cast<std::size_t>(c.shape.buckets);
  for (std::size_t row = 0; row < c.w2.size() / d; ++row) {
    const auto length = static_cast<float>(1 + row % buckets * 7 % levels);  // 1 of a head's first
    for (std::size_t i = 0; i < d; ++i) c.w2[row * d + i] = length * c.w2[row / buckets * buckets * d + i];
  }
  return c;
}

/// With `further`, its networks choose for the later half of the tokens.
Outcome run(const Case& c, const Case* further = nullptr) {
  const Shape& s = c.shape;
  const NetLayout net = {s.dim, s.hidden, s.buckets, s.planes, s.residual};
  std::vector<std::byte> nets = pack_nets(c, net);
  NetStretches stretches;
  if (further != nullptr) {
    const std::vector<std::byte> more = pack_nets(*further, net);
    nets.insert(nets.end(), more.begin(), more.end());
    stretches = {2, {0, static_cast<std::int32_t>(s.keys + kWindow - s.tokens + s.tokens / 2)}};
  }
  std::vector<QueryToken> places;  // all keys but the sink are far for the last
  for (int t = 0; t < s.tokens; ++t)
    places.push_back({0, static_cast<std::int32_t>(s.keys + kWindow - s.tokens + t)});
  Stream stream;
  const OnDevice<std::byte> nets_there(nets);
  const OnDevice<std::uint16_t> labels(c.labels);
  const OnDevice<float> q(c.q);
  const OnDevice<QueryToken> tokens(places);
  const auto of = [&](std::int64_t count, std::int32_t poison) {
    return OnDevice<std::int32_t>(Rows(static_cast<std::size_t>(count), poison));
  };
  const auto offsets = of(s.kv_heads * (s.buckets + 1), -1), listed_rows = of(s.kv_heads * s.keys, -1),
             listed = of(1, static_cast<std::int32_t>(s.listed)),
             rows = of(s.tokens * s.kv_heads * s.keys, -7), counts = of(s.tokens * s.kv_heads, -7),
             more = of(s.tokens * s.kv_heads * kShares * s.keys, -7);
  const std::int64_t runs = s.tokens * s.kv_heads * runs_of_choice(s.probes, s.buckets);
  const OnDevice<RowRun> runs_there(std::vector<RowRun>(static_cast<std::size_t>(runs), RowRun{-7, 1 << 30}));
  const Buffer workspace(list_workspace_bytes(s.kv_heads, s.buckets, s.keys), "workspace");
  list_buckets({.labels = labels.get(),
                .kv_heads = s.kv_heads,
                .buckets = s.buckets,
                .max_tokens = s.keys,
                .begin = kSink,
                .end = s.listed,
                .offsets = offsets.get(),
                .rows = listed_rows.get(),
                .workspace = workspace.as<void>()},
               stream.get());
  const BucketChoiceTask task = {
      .net = net,
      .nets = nets_there.get(),
      .stretches = stretches,
      .softmax = s.softmax,
      .rank = s.rank,
      .q = q.get(),
      .tables = {labels.get(), offsets.get(), listed_rows.get(), listed.get(), s.keys},
      .probes = s.probes,
      .sink = kSink,
      .window = kWindow,
      .runs = runs_there.get(),
      .more = more.get(),
      .share = s.keys};
  const Queries queries = {.tokens = tokens.get(),
                           .layout = {s.kv_heads, s.dim, DType::bf16, 0},
                           .count = s.tokens,
                           .query_heads = s.query_heads};
  choose_buckets(task, queries, stream.get());
  list_runs(queries, runs_of(task, counts.get(), s.keys), rows.get(), stream.get());
  return {offsets.read(stream), listed_rows.read(stream), rows.read(stream), counts.read(stream)};
}

/// Every key of [sink, listed) is in its bucket's list, in order.
void check_lists(const Case& c, const Outcome& out, int h, const char* what) {
  const Shape& s = c.shape;
  bool sorted = out.starts[static_cast<std::size_t>(h * (s.buckets + 1) + s.buckets)] == s.listed - kSink;
  for (int b = 0; b < s.buckets; ++b) {
    const auto at = [&](int i) { return out.starts[static_cast<std::size_t>(h * (s.buckets + 1) + i)]; };
    for (int i = at(b); i < at(b + 1); ++i) {
      const std::int32_t key = out.lists[static_cast<std::size_t>(h * s.keys + i)];
      sorted = sorted && key >= kSink && key < s.listed &&
               c.labels[static_cast<std::size_t>(h * s.keys + key)] == b &&
               (i == at(b) || out.lists[static_cast<std::size_t>(h * s.keys + i - 1)] < key);
    }
  }
  if (!sorted) test::fail(__FILE__, __LINE__, std::string(what) + ": lists");
}

/// Keys that a token attends in each bucket; every one far, and once.
std::vector<std::int64_t> keys_taken(const Case& c, const Outcome& out, int token, int h, const char* what) {
  const Shape& s = c.shape;
  const std::int64_t list = std::int64_t{token} * s.kv_heads + h, far_end = s.keys - s.tokens + 1 + token;
  const std::int32_t count = out.counts[static_cast<std::size_t>(list)];
  std::vector<std::int64_t> taken(static_cast<std::size_t>(s.buckets), 0);
  std::vector<char> seen(static_cast<std::size_t>(s.keys), 0);
  bool valid = count >= 0 && count <= s.keys;
  for (int i = 0; valid && i < count; ++i) {
    const std::int32_t key = out.rows[static_cast<std::size_t>(list * s.keys + i)];
    valid = key >= kSink && key < far_end && !seen[static_cast<std::size_t>(key)];
    if (!valid) break;
    seen[static_cast<std::size_t>(key)] = 1;
    ++taken[c.labels[static_cast<std::size_t>(h * s.keys + key)]];
  }
  if (!valid) test::fail(__FILE__, __LINE__, std::string(what) + ": a row that is none, or twice");
  return taken;
}

/// The lists of chosen buckets stand in their order, the best one's first.
void check_order(const Case& c, const Outcome& out, int token, int h, const std::vector<int>& best,
                 const char* what) {
  const Shape& s = c.shape;
  const auto label_of = [&](std::int64_t key) {
    return c.labels[static_cast<std::size_t>(h * s.keys + key)];
  };
  std::vector<char> listed(static_cast<std::size_t>(s.buckets), 0);
  for (std::int64_t key = kSink; key < s.listed; ++key) listed[label_of(key)] = 1;
  std::vector<int> expected, found;
  for (const int b : best)
    if (listed[static_cast<std::size_t>(b)]) expected.push_back(b);
  const std::int64_t list = std::int64_t{token} * s.kv_heads + h;
  for (int i = 0; i < out.counts[static_cast<std::size_t>(list)]; ++i) {
    const std::int32_t key = out.rows[static_cast<std::size_t>(list * s.keys + i)];
    if (key < s.listed && (found.empty() || found.back() != label_of(key))) found.push_back(label_of(key));
  }
  if (found != expected) test::fail(__FILE__, __LINE__, std::string(what) + ": lists out of order");
}

/// Chosen buckets are whole and the best up to the margin; without one, the best exactly, ties to the higher.
void check_choice(const Case& c, const Outcome& out, int token, int h, double margin, const char* what) {
  const Shape& s = c.shape;
  std::vector<std::int64_t> size(static_cast<std::size_t>(s.buckets), 0);
  for (std::int64_t key = kSink; key < s.keys - s.tokens + 1 + token; ++key)
    ++size[c.labels[static_cast<std::size_t>(h * s.keys + key)]];
  const std::vector<std::int64_t> taken = keys_taken(c, out, token, h, what);
  const std::vector<double> rank = ranks(c, token, h, size);
  std::vector<int> order;
  for (int b = s.buckets - 1; b >= 0; --b)
    if (size[static_cast<std::size_t>(b)] > 0) order.push_back(b);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return rank[static_cast<std::size_t>(a)] > rank[static_cast<std::size_t>(b)];
  });
  const int wanted = std::min<int>(s.probes, static_cast<int>(order.size()));
  int chosen = 0;
  double least = std::numeric_limits<double>::infinity(), most = -least;
  for (int place = 0; place < static_cast<int>(order.size()); ++place) {
    const auto b = static_cast<std::size_t>(order[static_cast<std::size_t>(place)]);
    const bool in = taken[b] > 0;
    chosen += in;
    if (in && taken[b] != size[b]) test::fail(__FILE__, __LINE__, std::string(what) + ": part of a bucket");
    if (margin == 0.0 && in != place < wanted)
      test::fail(__FILE__, __LINE__, std::string(what) + ": the wrong one of equal buckets");
    (in ? least : most) = in ? std::min(least, rank[b]) : std::max(most, rank[b]);
  }
  if (margin == 0.0) check_order(c, out, token, h, {order.begin(), order.begin() + wanted}, what);
  if (chosen != wanted)
    test::fail(__FILE__, __LINE__,
               std::string(what) + ": expected " + std::to_string(wanted) + " buckets, found " +
                   std::to_string(chosen));
  if (most > least + margin * std::abs(least))
    test::fail(__FILE__, __LINE__,
               std::string(what) + ": a bucket of " + std::to_string(least) + " before one of " +
                   std::to_string(most));
}

void check_case(const Case& c, double margin, const char* what) {
  const Outcome out = run(c);
  for (int h = 0; h < c.shape.kv_heads; ++h) {
    check_lists(c, out, h, what);
    for (int t = 0; t < c.shape.tokens; ++t) check_choice(c, out, t, h, margin, what);
  }
}

LODE_TEST(choose_buckets_takes_the_best) {
  LODE_NEEDS(can_choose_buckets());
  // Margins of weights of 8 and of 16 bits; scores have a standard deviation of 8 here.
  constexpr double kEight = 0.4, kSixteen = 1e-3;
  const struct {
    Shape shape;
    double margin;
    const char* what;
  } cases[] = {
      {{4, 1, 128, 1024, 1024, 1, 32, 20000, 20000}, kEight, "the paper's shape"},
      {{32, 8, 128, 1024, 1024, 2, 32, 20000, 18500}, kSixteen, "16-bit weights, keys behind the lists"},
      {{32, 8, 128, 0, 1024, 2, 32, 9000, 9000, false}, kSixteen, "centroids alone"},
      {{8, 2, 64, 256, 256, 2, 8, 3000, 1}, kSixteen, "nothing in lists yet"},
      {{8, 1, 64, 100, 37, 2, 5, 777, 700}, kSixteen, "ragged sizes, group of 8"},
      {{16, 1, 80, 64, 50, 2, 7, 999, 999}, kSixteen, "group of 16"},
      {{4, 1, 128, 1024, 2048, 1, 64, 50000, 49000}, kEight, "2048 buckets"},
      {{4, 1, 128, 64, 16, 2, 1000, 500, 400}, kSixteen, "every bucket"},
      {{4, 1, 128, 0, 1, 2, 1, 500, 400, false}, kSixteen, "one bucket"},
      {{4, 1, 64, 32, 64, 2, 300, 600, 600}, kSixteen, "more probes than threads"},
      {{8, 2, 64, 192, 512, 2, 16, 30000, 28500, true, true, BucketRank::per_root_of_keys},
       kSixteen,
       "residual, by root"},
      {{8, 2, 64, 192, 512, 1, 16, 30000, 28500, true, true}, kEight, "residual, 8-bit weights"},
      {{8, 2, 80, 100, 300, 2, 16, 5000, 4900, true, true, BucketRank::per_key},
       kSixteen,
       "residual, by key"},
      {{32, 8, 128, 1024, 1024, 2, 45, 60000, 57000, true, false, BucketRank::per_root_of_keys},
       kSixteen,
       "by root, more keys behind the lists than a thread holds labels of"},
      {{8, 2, 64, 192, 512, 2, 16, 9000, 8000, true, true, BucketRank::per_root_of_keys, 32},
       kSixteen,
       "32 tokens, each for itself"},
      {{32, 8, 128, 0, 256, 2, 8, 3000, 2900, false, false, BucketRank::mass, 3},
       kSixteen,
       "tokens by centroids"},
      {{32, 8, 128, 0, 4096, 1, 128, 40000, 39000, false}, kEight, "4096 centroids"},
      {{16, 8, 128, 0, 8192, 1, 256, 60000, 57000, false}, kEight, "8192 centroids, 256 of them"},
      {{8, 4, 128, 0, 3000, 2, 90, 20000, 19000, false}, kSixteen, "3000 centroids of 16 bits"},
      {{8, 2, 64, 0, 4096, 1, 128, 30000, 30000, false}, kEight, "4096 centroids of 64 numbers"},
      {{8, 2, 256, 0, 2048, 1, 65, 20000, 20000, false}, kEight, "2048 centroids of 256 numbers"},
      {{32, 16, 128, 0, 4096, 1, 128, 30000, 29000, false, false, BucketRank::mass, 2},
       kEight,
       "16 KV heads, two tokens"}};
  unsigned seed = 1;
  for (const auto& one : cases) check_case(make_case(one.shape, seed++), one.margin, one.what);
  Case bad = make_case({4, 1, 128, 256, 64, 2, 6, 2000, 1900}, 99);
  bad.q[5] = std::numeric_limits<float>::quiet_NaN();
  bad.q[128 + 7] = std::numeric_limits<float>::infinity();
  check_case(bad, kSixteen, "two heads of four that are not numbers");
}

// Where all scores are equal, sizes decide, and then the buckets' numbers: the CPU's order exactly.
/// Each token's choice is the one that its network makes alone.
LODE_TEST(choose_buckets_takes_the_network_of_the_position) {
  LODE_NEEDS(can_choose_buckets());
  const Shape shape = {8, 2, 64, 192, 512, 2, 16, 9000, 8000, true, true, BucketRank::per_root_of_keys, 8};
  const Case near = make_case(shape, 71), other = make_case(shape, 72);
  Case far = near;
  far.w1 = other.w1, far.b1 = other.b1, far.w2 = other.w2, far.w3 = other.w3, far.b2 = other.b2;
  const Outcome both = run(near, &far), first = run(near), second = run(far);
  const std::size_t half = both.counts.size() / 2, rows = both.rows.size() / 2;
  const auto same = [](const Rows& a, const Rows& b, std::size_t begin, std::size_t end) {
    return std::equal(a.begin() + static_cast<std::ptrdiff_t>(begin),
                      a.begin() + static_cast<std::ptrdiff_t>(end),
                      b.begin() + static_cast<std::ptrdiff_t>(begin));
  };
  if (first.rows == second.rows) test::fail(__FILE__, __LINE__, "networks that choose alike show nothing");
  if (!same(both.counts, first.counts, 0, half) || !same(both.rows, first.rows, 0, rows))
    test::fail(__FILE__, __LINE__, "tokens of the first network");
  if (!same(both.counts, second.counts, half, 2 * half) || !same(both.rows, second.rows, rows, 2 * rows))
    test::fail(__FILE__, __LINE__, "tokens of the second network");
}

LODE_TEST(choose_buckets_gives_ties_to_the_higher_bucket) {
  LODE_NEEDS(can_choose_buckets());
  for (const BucketRank rank : {BucketRank::mass, BucketRank::per_root_of_keys, BucketRank::per_key}) {
    for (const bool residual : {false, true}) {
      check_case(make_case({8, 2, 64, 192, 512, 2, 37, 4000, 3000, true, residual, rank, 2}, 7, 0.0f), 0.0,
                 "equal scores");
      // Most buckets are empty: fewer have keys than are asked for.
      check_case(make_case({8, 2, 64, 192, 512, 2, 64, 60, 40, true, residual, rank}, 8, 0.0f), 0.0,
                 "equal scores, few keys");
    }
  }
  check_case(make_case({32, 8, 128, 0, 1024, 1, 32, 9000, 9000, false}, 9, 0.0f), 0.0, "centroids of zero");
  check_case(make_case({8, 2, 128, 0, 4096, 1, 128, 9000, 8000, false}, 10, 0.0f), 0.0,
             "4096 centroids of zero");
  check_case(make_case({8, 2, 128, 0, 4096, 1, 128, 100, 90, false}, 11), 0.4, "more centroids than keys");
  check_case(with_levels(make_case({8, 2, 128, 0, 4096, 1, 100, 40000, 39000, false}, 12), 64), 0.0,
             "64 centroids of each length");
  check_case(with_levels(make_case({16, 4, 64, 0, 8192, 2, 256, 60000, 59000, false}, 13), 100), 0.0,
             "82 centroids of each length");
  // 16 query heads a KV head.
  check_case(make_case({144, 9, 128, 0, 2048, 1, 64, 9000, 8000}, 14, 0.0f), 0.0, "2048 equal scores");
  check_case(make_case({144, 9, 128, 0, 2048, 1, 64, 60, 40}, 15, 0.0f), 0.0, "2048 equal scores, few keys");
}

}  // namespace
}  // namespace lode::cuda
