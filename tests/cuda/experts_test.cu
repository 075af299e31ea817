// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts against float64: choices of every kind of router, with equal and broken scores; whole layers of 1
// to 300 rows over matrices of every type and format, with biases and a feed-forward of every token; that a row's
// bits do not depend on its neighbours.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <string>

#include "harness.h"
#include "kernels/cuda/experts/experts.h"
#include "reference.h"
#include "test_tiles.h"

namespace lode::cuda {
namespace {

using test::OnDevice, test::TestTiles;
using enum TileFormat;

struct Chosen {
  std::vector<int> expert;
  std::vector<double> weight;
};

std::vector<double> scores_of(bool sigmoid, std::vector<double> x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = sigmoid ? 1 / (1 + std::exp(-v)) : std::exp(v - most);
  if (!sigmoid)
    for (double& v : x) v /= sum;
  return x;
}
std::vector<int> ranked(const std::vector<double>& x) {
  std::vector<int> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return x[static_cast<std::size_t>(a)] > x[static_cast<std::size_t>(b)];
  });
  return order;
}

Chosen choose(const RouterPlan& p, std::vector<double> logits, const std::vector<float>& choice_bias) {
  if (!p.score_chosen) logits = scores_of(p.sigmoid, std::move(logits));
  std::vector<double> rank = logits;
  for (std::size_t i = 0; i < choice_bias.size(); ++i) rank[i] += static_cast<double>(choice_bias[i]);
  const auto size = static_cast<std::size_t>(p.count / p.groups);
  std::vector<double> best;
  for (int g = 0; g < p.groups; ++g) {
    std::vector<double> own(rank.begin() + g * static_cast<std::ptrdiff_t>(size),
                            rank.begin() + (g + 1) * static_cast<std::ptrdiff_t>(size));
    std::sort(own.rbegin(), own.rend());
    best.push_back(std::accumulate(own.begin(), own.begin() + p.group_best, 0.0));
  }
  const std::vector<int> groups = ranked(best);
  for (int g = p.groups_used; g < p.groups; ++g)
    std::fill_n(rank.begin() + groups[static_cast<std::size_t>(g)] * static_cast<std::ptrdiff_t>(size), size,
                -std::numeric_limits<double>::infinity());
  Chosen c;
  c.expert = ranked(rank);
  c.expert.resize(static_cast<std::size_t>(p.used));
  for (const int e : c.expert) c.weight.push_back(logits[static_cast<std::size_t>(e)]);
  if (p.score_chosen) c.weight = scores_of(p.sigmoid, c.weight);
  const double sum = std::accumulate(c.weight.begin(), c.weight.end(), 0.0);
  for (double& w : c.weight) w = w / (p.normalise ? sum : 1) * static_cast<double>(p.scale);
  return c;
}

/// A routing's memory, and what it holds.
struct TestRouting {
  TestRouting(std::int64_t n, const RouterPlan& plan)
      : rows(n),
        memory(routing_bytes(n, plan), "a routing"),
        routing(routing_in(memory.as<void>(), n, plan)) {
    fill(memory.as<void>(), 0, memory.bytes(), nullptr);
    cudaDeviceSynchronize();
  }
  template <class T>
  std::vector<T> read(const T* from, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    copy(values.data(), from, count * std::int64_t{sizeof(T)}, nullptr);
    cudaDeviceSynchronize();
    return values;
  }
  /// Every slot is in the list of its expert and in no other, in order.
  void check_lists(const std::vector<int>& expert, bool all, int experts) const {
    const int groups = read(routing.groups, 1)[0];
    const auto listed = read(routing.expert, groups), begin = read(routing.begin, groups + 1),
               order = read(routing.order, std::ssize(expert));
    if (all) LODE_CHECK(groups == experts);
    LODE_CHECK(begin[0] == 0 && begin.back() == static_cast<int>(expert.size()));
    LODE_CHECK(std::is_sorted(listed.begin(), listed.end()));
    for (int g = 0; g < groups; ++g) {
      const auto at = static_cast<std::size_t>(g);
      LODE_CHECK(all || begin[at] < begin[at + 1]);
      for (int i = begin[at]; i < begin[at + 1]; ++i) {
        const int slot = order[static_cast<std::size_t>(i)];
        LODE_CHECK(expert[static_cast<std::size_t>(slot)] == listed[at]);
        LODE_CHECK(i == begin[at] || order[static_cast<std::size_t>(i) - 1] < slot);
      }
    }
  }
  std::int64_t rows;
  Buffer memory;
  Routing routing;
};

/// Has logits [n, E] chosen from: as they are, or of few rows by a router whose norm and products give them.
void route_logits(const RouterPlan& plan, const std::vector<float>& logits, const float* bias,
                  const float* choice_bias, std::int64_t n, bool few, const TestRouting& to, Stream& stream) {
  const OnDevice<float> there(logits);
  if (!few) {
    route(plan, {there.get(), bias, choice_bias}, n, to.routing, stream.get());
    return stream.synchronize();
  }
  // Row t is 1 in one column alone once it is normed, and that column of the router has its logits. Columns lie in
  // front of and behind those that are fetched before the row is there.
  constexpr std::int64_t kHidden = 3400, kApart = 480;
  std::vector<float> x(static_cast<std::size_t>(n * kHidden)),
      w(static_cast<std::size_t>(plan.count * kHidden));
  for (std::int64_t t = 0; t < n; ++t) {
    x[static_cast<std::size_t>(t * kHidden + t * kApart)] = 1e4f;
    for (std::int64_t e = 0; e < plan.count; ++e)
      w[static_cast<std::size_t>(e * kHidden + t * kApart)] =
          logits[static_cast<std::size_t>(t * plan.count + e)];
  }
  const OnDevice<float> x_there(x), w_there(w), made(test::poison(logits.size())),
      gain(std::vector<float>(static_cast<std::size_t>(kHidden), 1 / std::sqrt(static_cast<float>(kHidden))));
  route_few(plan,
            {x_there.get(),
             {gain.get(), DType::f32, 1, kHidden},
             1e-5f,
             w_there.get(),
             {made.get(), bias, choice_bias}},
            n, to.routing, stream.get());
  stream.synchronize();
}

constexpr RouterPlan kPlans[] = {
    {.count = 8, .used = 2, .normalise = true},      // Mixtral
    {.count = 128, .used = 8, .normalise = true},    // Qwen3
    {.count = 64, .used = 8},                        // OLMoE
    {.count = 32, .used = 4, .score_chosen = true},  // gpt-oss
    {.count = 256,
     .used = 8,
     .sigmoid = true,
     .normalise = true,
     .scale = 2.5f,
     .groups = 8,
     .groups_used = 4,
     .group_best = 2},                              // DeepSeek-V3
    {.count = 512, .used = 10, .normalise = true},  // Qwen3-Next
    {.count = 5, .used = 5},
    {.count = 700, .used = 3},
};

LODE_TEST(experts_choices) {
  Stream stream;
  for (const RouterPlan& plan : kPlans) {
    for (const std::int64_t n : {1, 3, 8, 9, 300}) {
      for (const bool biased : {false, true}) {
        const auto e = static_cast<std::size_t>(plan.count), u = static_cast<std::size_t>(plan.used);
        std::vector<float> logits = test::normal(static_cast<std::size_t>(n) * e, 3, 2.0f);
        if (n > 1)  // equal scores of one row
          for (std::size_t i = 0; i < e; ++i) logits[e + i] = static_cast<float>(i % 3);
        const std::vector<float> bias = test::normal(e, 4), choice = test::normal(e, 5, 0.2f);
        const OnDevice<float> bias_there(bias), choice_there(choice);
        for (const bool few : {false, true}) {
          if (few && !are_few(n, plan)) continue;
          const TestRouting found(n, plan);
          for (int time = 0; time < 2; ++time)
            route_logits(plan, logits, biased ? bias_there.get() : nullptr,
                         biased ? choice_there.get() : nullptr, n, few, found, stream);
          const auto expert = found.read(found.routing.slot_expert, n * plan.used);
          const auto weight = found.read(found.routing.slot_weight, n * plan.used);
          for (std::size_t t = 0; t < static_cast<std::size_t>(n); ++t) {
            std::vector<double> row;
            for (std::size_t i = 0; i < e; ++i)
              row.push_back(static_cast<double>(logits[t * e + i] + (biased ? bias[i] : 0.0f)));
            const Chosen expected = choose(plan, row, biased ? choice : std::vector<float>{});
            for (std::size_t j = 0; j < u; ++j) {
              LODE_CHECK(expert[t * u + j] == expected.expert[j]);
              LODE_CHECK_CLOSE(static_cast<double>(weight[t * u + j]), expected.weight[j], 1e-5);
            }
          }
          found.check_lists(expert, !few, plan.count);
        }
      }
    }
  }
}

LODE_TEST(experts_broken_scores) {
  // What is no number is chosen last, once, and no place outside of the experts is.
  Stream stream;
  const float nan = std::numeric_limits<float>::quiet_NaN(), most = std::numeric_limits<float>::infinity();
  const RouterPlan plan = {.count = 6, .used = 4, .score_chosen = true};
  const std::vector<float> logits = {nan, 1,   -most, 2,    nan,  0,     nan, nan, nan,
                                     nan, nan, nan,   most, most, -most, nan, 0,   1};
  const std::vector<int> expected = {3, 1, 5, 2, 0, 1, 2, 3, 0, 1, 5, 4};
  const TestRouting found(3, plan);
  route_logits(plan, logits, nullptr, nullptr, 3, false, found, stream);
  LODE_CHECK(found.read(found.routing.slot_expert, 12) == expected);
  found.check_lists(expected, true, 6);
  for (int t = 0; t < 3; ++t) {
    const TestRouting alone(1, plan);
    const std::vector<float> row(logits.begin() + 6 * t, logits.begin() + 6 * t + 6);
    route_logits(plan, row, nullptr, nullptr, 1, true, alone, stream);
    const auto chosen = alone.read(alone.routing.slot_expert, 4);
    LODE_CHECK(std::equal(chosen.begin(), chosen.end(), expected.begin() + 4 * t));
    alone.check_lists(chosen, false, 6);
  }
}

/// The matrices of all experts of a layer, in one type or format.
struct TestMatrices {
  TestMatrices(int count, std::int64_t rows, std::int64_t cols, TileFormat format, DType type, unsigned seed,
               bool with_bias)
      : rows(rows),
        cols(cols),
        bias(test::normal(static_cast<std::size_t>(count * rows), seed + 1)),
        bias_there(bias) {
    const double spread = 1 / std::sqrt(static_cast<double>(cols));
    if (format != none) {
      tiles = std::make_unique<TestTiles>(format, count * rows, cols, seed, spread);
      values = tiles->values;
      m.all = tiles->weight;
    } else {
      std::vector<float> numbers =
          test::normal(static_cast<std::size_t>(count * rows * cols), seed, static_cast<float>(spread));
      for (float& x : numbers) values.push_back(static_cast<double>(x = test::rounded(x, type)));
      plain = std::make_unique<OnDevice<char>>(test::encode(numbers, type));
      m.all = {plain->get(), type, count * rows, cols};
    }
    m.count = count;
    if (with_bias)
      m.bias = bias_there.get();
    else
      bias.assign(bias.size(), 0.0f);
  }
  std::vector<double> multiply(int expert, const std::vector<double>& x) const {
    std::vector<double> y(static_cast<std::size_t>(rows));
    for (std::int64_t r = 0; r < rows; ++r) {
      const double* const w = values.data() + (expert * rows + r) * cols;
      y[static_cast<std::size_t>(r)] = std::inner_product(x.begin(), x.end(), w, 0.0) +
                                       static_cast<double>(bias[static_cast<std::size_t>(expert * rows + r)]);
    }
    return y;
  }
  std::int64_t rows, cols;
  std::vector<float> bias;
  OnDevice<float> bias_there;
  std::unique_ptr<TestTiles> tiles;
  std::unique_ptr<OnDevice<char>> plain;
  std::vector<double> values;
  ExpertMatrices m;
};

struct Kind {
  TileFormat gate, up, down;
  DType type = DType::bf16;
};

/// A layer with experts, and what it adds to a row.
struct TestLayer {
  TestLayer(const RouterPlan& plan, std::int64_t hidden, std::int64_t width, const Kind& kind, bool whole)
      : hidden(hidden),
        gate(plan.count, width, hidden, kind.gate, kind.type, 20, whole),
        up(plan.count, width, hidden, kind.up, kind.type, 22, whole),
        down(plan.count, hidden, width, kind.down, kind.type, 24, whole),
        shared(1, 64, hidden, none, DType::f32, 26, false),
        shared_up(1, 64, hidden, none, DType::f32, 28, false),
        shared_down(1, hidden, 64, none, DType::f32, 30, false),
        gain(test::normal(static_cast<std::size_t>(hidden), 31)),
        router(test::normal(static_cast<std::size_t>(plan.count * hidden), 32, 0.1f)),
        shared_gate(test::normal(static_cast<std::size_t>(hidden), 33, 0.1f)),
        router_gain(test::normal(static_cast<std::size_t>(hidden), 34)),
        post_gain(test::normal(static_cast<std::size_t>(hidden), 35)),
        shared_gain(test::normal(static_cast<std::size_t>(hidden), 36)),
        factors(test::normal(static_cast<std::size_t>(plan.count), 37)),
        gain_there(gain),
        router_there(router),
        shared_gate_there(shared_gate),
        router_gain_there(router_gain),
        post_gain_there(post_gain),
        shared_gain_there(shared_gain),
        factors_there(factors) {
    a.norm = {gain_there.get(), DType::f32, 1, hidden};
    a.plan = plan;
    a.router = {router_there.get(), DType::f32, plan.count, hidden};
    a.gate = gate.m, a.up = up.m, a.down = down.m;
    if (!whole) return;
    a.activation = {.slope = 1.702f, .limit = 1.5f, .offset = 1.0f};
    a.shared = {a.norm, shared.m.all, shared_up.m.all, shared_down.m.all, {}, {}, {}, a.eps};
    a.shared_gate = {shared_gate_there.get(), DType::f32, 1, hidden};
    a.addition.multiplier = 0.5f;
  }
  /// Router, experts and the feed-forward of every token get norms of their own, before and behind; an expert's weight a
  /// factor, and the stream one behind all.
  void set_apart() {
    const auto gain_of = [](const OnDevice<float>& there, std::int64_t cols) {
      return DeviceWeight{there.get(), DType::f32, 1, cols};
    };
    a.router_norm = gain_of(router_gain_there, hidden);
    a.factors = factors_there.get();
    a.shared_gate = {};
    a.post_norm = gain_of(post_gain_there, hidden), a.shared_post_norm = gain_of(shared_gain_there, hidden);
    a.addition = {gain_of(gain_there, hidden), a.eps, 0.5f, 1.25f};
  }
  std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& by) const {
    const double square = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    std::vector<double> y(x);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] *= static_cast<double>(by[i]) /
              std::sqrt(square / static_cast<double>(hidden) + static_cast<double>(a.eps));
    return y;
  }
  static double silu(double g, double u) { return g / (1 + std::exp(-g)) * u; }
  double activated(double g, double u) const {
    if (a.activation.offset == 0.0f) return silu(g, u);
    g = std::min(g, 1.5), u = std::clamp(u, -1.5, 1.5);
    return g / (1 + std::exp(-1.702 * g)) * (u + 1);
  }
  std::vector<double> add(const float* x) const {
    const std::vector<double> stream(x, x + hidden), h = normed(stream, gain);
    const bool apart = a.post_norm.data != nullptr;
    const std::vector<double> routed = apart ? normed(stream, router_gain) : h;
    std::vector<double> logits, sum(static_cast<std::size_t>(hidden), 0.0), dense;
    for (int e = 0; e < a.plan.count; ++e)
      logits.push_back(std::inner_product(routed.begin(), routed.end(), router.begin() + e * hidden, 0.0));
    if (a.shared.gate.data != nullptr) {
      auto g = shared.multiply(0, h);
      const auto u = shared_up.multiply(0, h);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = silu(g[i], u[i]);
      sum = shared_down.multiply(0, g);
      const double weight =
          1 / (1 + std::exp(-std::inner_product(h.begin(), h.end(), shared_gate.begin(), 0.0)));
      if (a.shared_gate.data != nullptr)
        for (double& y : sum) y *= weight;
    }
    if (apart) dense = normed(sum, shared_gain), sum.assign(sum.size(), 0.0);
    const Chosen chosen = choose(a.plan, logits, {});
    for (std::size_t j = 0; j < chosen.expert.size(); ++j) {
      auto g = gate.multiply(chosen.expert[j], h);
      const auto u = up.multiply(chosen.expert[j], h);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = activated(g[i], u[i]);
      const auto y = down.multiply(chosen.expert[j], g);
      const double factor =
          apart ? static_cast<double>(factors[static_cast<std::size_t>(chosen.expert[j])]) : 1.0;
      for (std::size_t i = 0; i < y.size(); ++i) sum[i] += factor * chosen.weight[j] * y[i];
    }
    if (apart) {
      sum = normed(sum, post_gain);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += dense[i];
      sum = normed(sum, gain);
    }
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] = (stream[i] + static_cast<double>(a.addition.multiplier) * sum[i]) *
               static_cast<double>(a.addition.factor);
    return sum;
  }
  ExpertSizes sizes() const {
    return {hidden, gate.rows, a.plan, a.gate.all.tiled() || a.down.all.tiled() ? gate.rows : 0, hidden};
  }
  std::int64_t hidden;
  TestMatrices gate, up, down, shared, shared_up, shared_down;
  std::vector<float> gain, router, shared_gate, router_gain, post_gain, shared_gain, factors;
  OnDevice<float> gain_there, router_there, shared_gate_there, router_gain_there, post_gain_there,
      shared_gain_there, factors_there;
  ExpertArguments a;
};

constexpr Kind kKinds[] = {{none, none, none, DType::f32},
                           {none, none, none, DType::f16},
                           {none, none, none, DType::bf16},
                           {q4_k, q4_k, q6_k},
                           {q4_k, q5_k, q4_k},
                           {q8_0, q8_0, q8_0},
                           {mxfp4, mxfp4, mxfp4},
                           {q4_0, q4_0, q4_1},
                           {q5_0, q5_0, q5_1},
                           {none, none, q8_0}};

LODE_TEST(experts_layer) {
  Stream stream;
  const RouterPlan plan = {.count = 12, .used = 3, .normalise = true};
  const std::int64_t hidden = 512, width = 256;
  for (const Kind& kind : kKinds) {
    for (const int parts : {0, 1, 2}) {
      const bool whole = parts > 0;
      TestLayer layer(plan, hidden, width, kind, whole);
      if (parts == 2) layer.set_apart();
      for (const Precision precision : {Precision::fast, Precision::exact}) {
        for (const std::int64_t n : {1, 2, 5, 8, 9, 20, 33, 300}) {
          Linear linear(stream.get(), precision);
          linear.reserve(n, hidden, 2 * width, hidden, hidden);
          Experts experts(linear, stream.get(), precision);
          experts.reserve(layer.sizes(), n);
          const std::vector<float> x = test::normal(static_cast<std::size_t>(n * hidden), 9, 2.0f);
          const OnDevice<float> there(x);
          experts.add(layer.a, n, there.get());
          std::vector<double> expected;
          for (std::int64_t t = 0; t < n; ++t) {
            const auto row = layer.add(x.data() + t * hidden);
            expected.insert(expected.end(), row.begin(), row.end());
          }
          const double allowed = precision == Precision::exact              ? 3e-6
                                 : n > (kind.down == none ? 8 : kTiledRows) ? 8e-3
                                 : kind.down == none                        ? 2e-5
                                                                            : 2e-4;
          LODE_CHECK_ERROR(
              there.read(stream), expected, allowed,
              std::string(test::name_of_format(kind.gate)) + " " + std::string(name_of(kind.type)) +
                  (parts == 0   ? ""
                   : parts == 1 ? " whole"
                                : " apart") +
                  (precision == Precision::exact ? " exact" : "") + " rows " + std::to_string(n));
        }
      }
    }
  }
}

LODE_TEST(experts_few_behind_many) {
  // A row goes through the same experts whatever numbers of rows came before it.
  Stream stream;
  for (const RouterPlan& plan : {RouterPlan{.count = 32, .used = 4}, RouterPlan{.count = 128, .used = 8}}) {
    const TestLayer layer(plan, 160, 96, {none, none, none, DType::bf16}, false);
    Linear linear(stream.get(), Precision::fast);
    linear.reserve(700, 160, 192, 160, 160);
    const std::vector<float> row = test::normal(160, 5), rows = test::normal(700 * 160, 6);
    const auto behind = [&](std::int64_t before) {
      Experts experts(linear, stream.get(), Precision::fast);
      experts.reserve(layer.sizes(), 700);
      const OnDevice<float> many(rows), one(row);
      if (before > 0) experts.add(layer.a, before, many.get());
      for (int time = 0; time < 2; ++time) experts.add(layer.a, 1, one.get());
      return one.read(stream);
    };
    const std::vector<float> expected = behind(0);
    for (const std::int64_t n : {9, 40, 60, 84, 100, 130, 200, 400, 700}) LODE_CHECK(behind(n) == expected);
  }
}

LODE_TEST(experts_sizes) {
  // Widths that no tile of products divides, more experts than a panel holds, and rows that all choose one expert.
  Stream stream;
  for (const Kind& kind : {Kind{none, none, none, DType::bf16}, Kind{q8_0, q8_0, q8_0}}) {
    const RouterPlan plan = {.count = 40, .used = 1};
    const TestLayer layer(plan, 160, 96, kind, false);
    for (const std::int64_t n : {1, 8, 130, 700}) {
      Linear linear(stream.get(), Precision::fast);
      linear.reserve(n, 160, 160, 160, 160);
      Experts experts(linear, stream.get(), Precision::fast);
      experts.reserve(layer.sizes(), n);
      std::vector<float> x = test::normal(160, 5, 2.0f);
      for (std::int64_t t = 1; t < n; ++t) x.insert(x.end(), x.begin(), x.begin() + 160);
      const OnDevice<float> there(x);
      experts.add(layer.a, n, there.get());
      const std::vector<double> row = layer.add(x.data());
      std::vector<double> expected;
      for (std::int64_t t = 0; t < n; ++t) expected.insert(expected.end(), row.begin(), row.end());
      LODE_CHECK_ERROR(there.read(stream), expected, 8e-3, "rows " + std::to_string(n));
    }
  }
}

/// A row alone, and the same row among up to eight: equal bits.
void check_neighbours(const Kind& kind, std::int64_t hidden, std::int64_t width, Stream& stream) {
  const TestLayer layer({.count = 12, .used = 3}, hidden, width, kind, true);
  Linear linear(stream.get(), Precision::fast);
  linear.reserve(8, hidden, hidden, hidden, hidden);
  Experts experts(linear, stream.get(), Precision::fast);
  experts.reserve(layer.sizes(), 8);
  const std::vector<float> row = test::normal(static_cast<std::size_t>(hidden), 35);
  const OnDevice<float> alone(row);
  experts.add(layer.a, 1, alone.get());
  const std::vector<float> expected = alone.read(stream);
  for (const int n : {2, 5, 8}) {
    for (int place = 0; place < n; ++place) {
      std::vector<float> batch =
          test::normal(static_cast<std::size_t>(n * hidden), 36 + static_cast<unsigned>(n));
      std::copy(row.begin(), row.end(), batch.begin() + place * hidden);
      const OnDevice<float> together(batch);
      experts.add(layer.a, n, together.get());
      const std::vector<float> found = together.read(stream);
      LODE_CHECK(std::equal(expected.begin(), expected.end(), found.begin() + place * hidden));
    }
  }
}

LODE_TEST(experts_neighbours) {
  Stream stream;
  for (const Kind& kind : kKinds) check_neighbours(kind, 512, 256, stream);
  // Columns that the warps of a block take in two and in three turns.
  for (const Kind& kind : {Kind{q8_0, q8_0, q8_0}, Kind{mxfp4, mxfp4, mxfp4}})
    for (const std::int64_t hidden : {9 * 256, 17 * 256}) check_neighbours(kind, hidden, 64, stream);
}

}  // namespace
}  // namespace lode::cuda
