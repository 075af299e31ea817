// SPDX-License-Identifier: Apache-2.0
// Buckets: lists against a plain sort; the chosen ones against the network in float64, where the margin is
// clear; keys behind the lists, empty buckets, every bucket, a head that is not a number.
#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/buckets.h"
#include "kernels/cuda/classifier.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;

struct Shape {
  int query_heads, kv_heads, dim, hidden, buckets, planes, probes;
  std::int64_t keys, listed;
  bool softmax = true;
};

struct Case {
  Shape shape;
  std::vector<float> w1, b1, w2, q;   // [Hkv, ...], [Hq, d]
  std::vector<std::uint16_t> labels;  // [Hkv, keys]
};

Case make_case(const Shape& s, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& x, std::int64_t n) {
    x.resize(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(random);
  };
  Case c = {s, {}, {}, {}, {}, {}};
  const std::int64_t heads = s.kv_heads, mid = s.hidden > 0 ? s.hidden : s.dim;
  fill(c.w1, heads * s.hidden * s.dim);
  fill(c.b1, heads * s.hidden);
  fill(c.w2, heads * s.buckets * mid);
  for (float& v : c.w2) v /= std::sqrt(static_cast<float>(mid));
  fill(c.q, std::int64_t{s.query_heads} * s.dim);
  for (std::int64_t i = 0; i < heads * s.keys; ++i)  // one bucket has a fifth of the keys, one has none
    c.labels.push_back(
        static_cast<std::uint16_t>(i % 5 == 0 ? 3 % s.buckets : 1 + random() % std::max(1, s.buckets - 1)) %
        static_cast<std::uint16_t>(s.buckets));
  return c;
}

/// What every bucket is ranked by, in float64.
std::vector<double> ranks(const Case& c, int head) {
  const Shape& s = c.shape;
  const int group = s.query_heads / s.kv_heads, mid = s.hidden > 0 ? s.hidden : s.dim;
  const auto scores = [&](const std::vector<double>& x) {
    std::vector<double> h = x;
    if (s.hidden > 0) {
      h.assign(static_cast<std::size_t>(s.hidden), 0.0);
      for (int i = 0; i < s.hidden; ++i) {
        double sum = c.b1[static_cast<std::size_t>(head * s.hidden + i)];
        for (int j = 0; j < s.dim; ++j)
          sum += c.w1[static_cast<std::size_t>((head * s.hidden + i) * s.dim + j)] *
                 x[static_cast<std::size_t>(j)];
        h[static_cast<std::size_t>(i)] = std::max(0.0, sum);
      }
    }
    std::vector<double> y(static_cast<std::size_t>(s.buckets), 0.0);
    for (int b = 0; b < s.buckets; ++b)
      for (int j = 0; j < mid; ++j)
        y[static_cast<std::size_t>(b)] +=
            c.w2[static_cast<std::size_t>(head * s.buckets + b) * static_cast<std::size_t>(mid) +
                 static_cast<std::size_t>(j)] *
            h[static_cast<std::size_t>(j)];
    return y;
  };
  std::vector<double> rank(static_cast<std::size_t>(s.buckets), 0.0),
      together(static_cast<std::size_t>(s.dim), 0.0);
  for (int g = 0; g < group; ++g) {
    const auto from = c.q.begin() + (head * group + g) * s.dim;
    const std::vector<double> x(from, from + s.dim);
    for (int j = 0; j < s.dim; ++j) together[static_cast<std::size_t>(j)] += x[static_cast<std::size_t>(j)];
    if (!s.softmax || std::any_of(x.begin(), x.end(), [](double v) { return !std::isfinite(v); })) continue;
    const std::vector<double> y = scores(x);
    const double most = *std::max_element(y.begin(), y.end());
    double total = 0.0;
    for (const double v : y) total += std::exp(v - most);
    for (std::size_t b = 0; b < y.size(); ++b) rank[b] += std::exp(y[b] - most) / total;
  }
  return s.softmax ? rank : scores(together);
}

void check_case(const Case& c, double margin, const char* what) {
  const Shape& s = c.shape;
  const std::int64_t sink = 1, window = 16, position = s.keys + window - 1;  // all keys but the first are far
  const NetLayout net = {s.dim, s.hidden, s.buckets, s.planes};
  std::vector<std::byte> nets;
  const int mid = s.hidden > 0 ? s.hidden : s.dim;
  for (int h = 0; h < s.kv_heads; ++h) {
    const auto part = [&](const std::vector<float>& x, std::int64_t each) {
      return std::span(x).subspan(static_cast<std::size_t>(h * each), static_cast<std::size_t>(each));
    };
    const auto one = pack_net(net, part(c.w1, std::int64_t{s.hidden} * s.dim), part(c.b1, s.hidden),
                              part(c.w2, std::int64_t{s.buckets} * mid), {});
    nets.insert(nets.end(), one.begin(), one.end());
  }
  Stream stream;
  const OnDevice<std::byte> nets_there(nets);
  const OnDevice<std::uint16_t> labels(c.labels);
  const OnDevice<float> q(c.q);
  const OnDevice<QueryToken> tokens({{0, static_cast<std::int32_t>(position)}});
  const OnDevice<std::int32_t> offsets(Rows(static_cast<std::size_t>(s.kv_heads * (s.buckets + 1)), -1)),
      listed_rows(Rows(static_cast<std::size_t>(s.kv_heads * s.keys), -1)),
      firsts(Rows(static_cast<std::size_t>(s.kv_heads * s.buckets), -1)),
      listed({static_cast<std::int32_t>(s.listed)}),
      rows(Rows(static_cast<std::size_t>(s.kv_heads * s.keys), -7)),
      counts(Rows(static_cast<std::size_t>(s.kv_heads), -7));
  const Buffer workspace(list_workspace_bytes(s.kv_heads, s.buckets, s.keys), "workspace");
  list_buckets({.labels = labels.get(),
                .kv_heads = s.kv_heads,
                .buckets = s.buckets,
                .max_tokens = s.keys,
                .begin = sink,
                .end = s.listed,
                .labelled = s.keys,
                .offsets = offsets.get(),
                .rows = listed_rows.get(),
                .firsts = firsts.get(),
                .workspace = workspace.as<void>()},
               stream.get());
  choose_buckets(
      {.net = net,
       .nets = nets_there.get(),
       .softmax = s.softmax,
       .q = q.get(),
       .tables = {labels.get(), offsets.get(), listed_rows.get(), firsts.get(), listed.get(), s.keys},
       .probes = s.probes,
       .sink = sink,
       .window = window,
       .rows = rows.get(),
       .counts = counts.get(),
       .capacity = s.keys},
      {.tokens = tokens.get(),
       .layout = {s.kv_heads, s.dim, DType::bf16, 0},
       .count = 1,
       .query_heads = s.query_heads},
      stream.get());
  const Rows found = rows.read(stream), many = counts.read(stream), starts = offsets.read(stream),
             lists = listed_rows.read(stream);
  for (int h = 0; h < s.kv_heads; ++h) {
    const auto label = [&](std::int32_t key) { return c.labels[static_cast<std::size_t>(h * s.keys + key)]; };
    std::vector<std::int64_t> size(static_cast<std::size_t>(s.buckets), 0);
    for (std::int32_t key = static_cast<std::int32_t>(sink); key < s.keys; ++key) ++size[label(key)];
    bool sorted = true;
    for (int b = 0; b < s.buckets; ++b) {
      const auto at = [&](int i) { return starts[static_cast<std::size_t>(h * (s.buckets + 1) + i)]; };
      for (int i = at(b); i < at(b + 1); ++i) {
        const std::int32_t key = lists[static_cast<std::size_t>(h * s.keys + i)];
        sorted = sorted && key >= sink && key < s.listed && label(key) == b &&
                 (i == at(b) || lists[static_cast<std::size_t>(h * s.keys + i - 1)] < key);
      }
    }
    if (!sorted || starts[static_cast<std::size_t>(h * (s.buckets + 1) + s.buckets)] != s.listed - sink)
      test::fail(__FILE__, __LINE__, std::string(what) + ": lists");
    std::vector<std::int64_t> taken(static_cast<std::size_t>(s.buckets), 0);
    std::vector<char> seen(static_cast<std::size_t>(s.keys), 0);
    bool valid = many[static_cast<std::size_t>(h)] <= s.keys;
    for (int i = 0; valid && i < many[static_cast<std::size_t>(h)]; ++i) {
      const std::int32_t key = found[static_cast<std::size_t>(h * s.keys + i)];
      valid = key >= sink && key < s.keys && !seen[static_cast<std::size_t>(key)];
      if (!valid) break;
      seen[static_cast<std::size_t>(key)] = 1;
      ++taken[label(key)];
    }
    if (!valid) test::fail(__FILE__, __LINE__, std::string(what) + ": a row that is none, or twice");
    const std::vector<double> rank = ranks(c, h);
    int chosen = 0, full = 0;
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (int b = 0; b < s.buckets; ++b) {
      full += size[static_cast<std::size_t>(b)] > 0;
      if (taken[static_cast<std::size_t>(b)] > 0) {
        ++chosen;
        least = std::min(least, rank[static_cast<std::size_t>(b)]);
        if (taken[static_cast<std::size_t>(b)] != size[static_cast<std::size_t>(b)])
          test::fail(__FILE__, __LINE__, std::string(what) + ": part of a bucket");
      } else if (size[static_cast<std::size_t>(b)] > 0) {
        most = std::max(most, rank[static_cast<std::size_t>(b)]);
      }
    }
    if (chosen != std::min(s.probes, full))
      test::fail(__FILE__, __LINE__,
                 std::string(what) + ": expected " + std::to_string(std::min(s.probes, full)) +
                     " buckets, found " + std::to_string(chosen));
    if (most > least + margin * std::abs(least))
      test::fail(__FILE__, __LINE__,
                 std::string(what) + ": a bucket of " + std::to_string(least) + " before one of " +
                     std::to_string(most));
  }
}

LODE_TEST(choose_buckets_takes_the_best) {
  if (!can_choose_buckets()) return;
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
      {{4, 1, 64, 32, 64, 2, 300, 600, 600}, kSixteen, "more probes than threads"}};
  unsigned seed = 1;
  for (const auto& one : cases) check_case(make_case(one.shape, seed++), one.margin, one.what);
  Case bad = make_case({4, 1, 128, 256, 64, 2, 6, 2000, 1900}, 99);
  bad.q[5] = std::numeric_limits<float>::quiet_NaN();
  bad.q[128 + 7] = std::numeric_limits<float>::infinity();
  check_case(bad, kSixteen, "two heads of four that are not numbers");
}

}  // namespace
}  // namespace lode::cuda
