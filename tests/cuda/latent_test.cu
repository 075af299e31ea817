// SPDX-License-Identifier: Apache-2.0
// Attention over rows that all heads share against float64: all keys, lists, weights and tails, many tokens, parts of a
// document; few and many keys and heads, huge scores, rows that are all alike, NaN and infinities. That bits do not depend
// on company, on how a text is cut or on what a graph is made for. Then what stands around it: products of each head with
// a matrix of its own, and how queries and rows are put together.
#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/attend/attend_runs.h"
#include "kernels/cuda/attend/attend_shared.h"
#include "kernels/cuda/latent/latent.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  int d = 576, query_heads = 16, kv_heads = 1;
  DType type = DType::bf16;
  std::vector<int> positions;  // of one query token each, each of its own sequence
  float deviation = 1.0f;
};

struct Result {
  std::vector<float> o, lse;
};
struct Expected {
  std::vector<double> o, lse;
};

/// Rows of some sequences, rounded to the store's type, and queries; what the device has of them.
struct World {
  explicit World(const Case& c) : of(c), layout{c.kv_heads, c.d, c.type, 0, true} {
    for (std::size_t s = 0; s < c.positions.size(); ++s) {
      rows.push_back(test::normal(static_cast<std::size_t>((c.positions[s] + 1) * c.d),
                                  static_cast<unsigned>(7 + s), c.deviation));
      for (float& x : rows.back()) x = test::rounded(x, c.type);
    }
    q = test::normal(c.positions.size() * static_cast<std::size_t>(c.query_heads * c.d), 3, c.deviation);
  }
  std::size_t tokens() const { return of.positions.size(); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(of.d)); }

  /// Everything that is no token's is NaN.
  void upload() {
    memory.clear();
    std::vector<const char*> pointers;
    std::vector<QueryToken> places;
    for (std::size_t s = 0; s < tokens(); ++s) {
      std::vector<char> bytes(static_cast<std::size_t>(layout.layer_bytes(of.positions[s] + 1)),
                              static_cast<char>(0xff));
      const std::vector<char> raw = test::encode(rows[s], of.type);
      std::copy(raw.begin(), raw.end(), bytes.begin());
      memory.emplace_back(bytes);
      pointers.push_back(memory.back().get());
      places.push_back({static_cast<int>(s), of.positions[s]});
    }
    bases.emplace(pointers);
    query_tokens.emplace(places);
    queries.emplace(q);
  }

  /// Lists that a decode kernel takes, in host memory: rows [lists][..].
  struct Lists {
    std::vector<std::vector<std::int32_t>> rows;
    std::vector<std::vector<float>> weights;  // of the same lengths; empty: none
    int per_head = 1;
    std::int64_t sink = 0, window = 0;
    std::vector<float> tail_output, tail_lse;
  };

  Result run(std::size_t first, std::size_t count, const Lists* lists = nullptr) {
    const std::size_t states = count * static_cast<std::size_t>(of.query_heads),
                      d = static_cast<std::size_t>(of.d);
    const OnDevice<float> o(test::poison(states * d)), lse(test::poison(states));
    const OnDevice<char> workspace(
        std::vector<char>(static_cast<std::size_t>(decode_workspace_bytes(static_cast<int>(count),
                                                                          of.query_heads, of.kv_heads, of.d)),
                          static_cast<char>(0)));
    const Queries in = {.tokens = query_tokens->get() + first,
                        .bases = bases->get(),
                        .layer_offset = 0,
                        .layout = layout,
                        .count = static_cast<int>(count),
                        .query_heads = of.query_heads,
                        .scale = scale(),
                        .q = queries->get() + first * static_cast<std::size_t>(of.query_heads) * d,
                        .o = o.get(),
                        .lse = lse.get()};
    if (lists == nullptr)
      attend_full_decode(in, most_tokens, workspace.get(), stream.get());
    else
      run_lists(in, first, *lists, workspace.get());
    stream.synchronize();
    return {o.read(stream), lse.read(stream)};
  }
  void run_lists(const Queries& in, std::size_t first, const Lists& lists, void* workspace) {
    const std::size_t per_token = static_cast<std::size_t>(of.kv_heads * lists.per_head),
                      count = static_cast<std::size_t>(in.count) * per_token;
    std::size_t capacity = 1;
    for (const auto& one : lists.rows) capacity = std::max(capacity, one.size());
    std::vector<std::int32_t> all(capacity * count, 1 << 30), counts;
    std::vector<float> weights(capacity * count, 0.0f);
    for (std::size_t i = 0; i < count; ++i) {
      const auto& one = lists.rows[first * per_token + i];
      std::copy(one.begin(), one.end(), all.begin() + static_cast<std::ptrdiff_t>(i * capacity));
      if (!lists.weights.empty())
        std::ranges::copy(lists.weights[first * per_token + i],
                          weights.begin() + static_cast<std::ptrdiff_t>(i * capacity));
      counts.push_back(static_cast<std::int32_t>(one.size()));
    }
    const OnDevice<std::int32_t> rows_there(all), counts_there(counts);
    const OnDevice<float> weights_there(weights), tails(lists.tail_output), tail_lse(lists.tail_lse);
    const std::size_t row = first * static_cast<std::size_t>(of.query_heads);
    attend_rows_decode(
        in,
        {.rows = rows_there.get(),
         .counts = counts_there.get(),
         .log_weights = lists.weights.empty() ? nullptr : weights_there.get(),
         .capacity = static_cast<std::int64_t>(capacity),
         .lists_per_head = lists.per_head,
         .sink = lists.sink,
         .window = lists.window,
         .tail_output = lists.tail_lse.empty() ? nullptr : tails.get() + row * static_cast<std::size_t>(of.d),
         .tail_lse = lists.tail_lse.empty() ? nullptr : tail_lse.get() + row},
        most_tokens, workspace, stream.get());
    stream.synchronize();
  }

  /// The matrix unit takes queries, times the scale, of the store's type; rows of other sizes keep them in float32.
  double rounded_query(float x) const {
    if (of.d != 128 && of.d != 288 && of.d != 576) return double{x};
    const float factor = scale() * 1.44269504f;
    return double{test::rounded(x * factor, of.type)} / double{factor};
  }

  Expected expected(const Lists* lists = nullptr) const {
    Expected e;
    for (std::size_t t = 0; t < tokens(); ++t) {
      for (int head = 0; head < of.query_heads; ++head) {
        const int group = of.query_heads / of.kv_heads, all = of.positions[t] + 1;
        std::vector<std::int32_t> keys(static_cast<std::size_t>(all));
        std::iota(keys.begin(), keys.end(), 0);
        std::vector<float> weights(keys.size(), 0.0f);
        if (lists != nullptr) {
          const std::size_t list =
              (t * static_cast<std::size_t>(of.kv_heads) + static_cast<std::size_t>(head / group)) *
                  static_cast<std::size_t>(lists->per_head) +
              static_cast<std::size_t>(lists->per_head > 1 ? head % group : 0);
          const int sink = static_cast<int>(std::min<std::int64_t>(lists->sink, all));
          keys.resize(static_cast<std::size_t>(sink));
          keys.insert(keys.end(), lists->rows[list].begin(), lists->rows[list].end());
          weights.assign(keys.size(), 0.0f);
          if (!lists->weights.empty()) std::ranges::copy(lists->weights[list], weights.begin() + sink);
          for (int key = std::max(sink, all - static_cast<int>(lists->window)); key < all; ++key)
            keys.push_back(key), weights.push_back(0.0f);
        }
        add_expected(t, head, keys, weights, lists, e);
      }
    }
    return e;
  }
  void add_expected(std::size_t t, int head, const std::vector<std::int32_t>& keys,
                    const std::vector<float>& weights, const Lists* lists, Expected& e) const {
    const std::size_t state = t * static_cast<std::size_t>(of.query_heads) + static_cast<std::size_t>(head);
    const float* const from = q.data() + state * static_cast<std::size_t>(of.d);
    std::vector<double> scores, out(static_cast<std::size_t>(of.d), 0.0);
    const bool tail = lists != nullptr && !lists->tail_lse.empty();
    double peak = tail ? static_cast<double>(lists->tail_lse[state]) : -static_cast<double>(kInf), sum = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const float* const key = rows[t].data() + std::int64_t{keys[i]} * of.d;
      double s = 0;
      for (int c = 0; c < of.d; ++c) s += rounded_query(from[c]) * double{key[c]};
      scores.push_back(s * static_cast<double>(scale()) + double{weights[i]});
      peak = std::max(peak, scores.back());
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const double p = std::exp(scores[i] - peak);
      sum += p;
      for (int c = 0; c < of.d; ++c)
        out[static_cast<std::size_t>(c)] += p * double{rows[t][static_cast<std::size_t>(keys[i] * of.d + c)]};
    }
    if (tail) {
      const double p = std::exp(static_cast<double>(lists->tail_lse[state]) - peak);
      sum += p;
      for (int c = 0; c < of.d; ++c)
        out[static_cast<std::size_t>(c)] +=
            p *
            double{lists->tail_output[state * static_cast<std::size_t>(of.d) + static_cast<std::size_t>(c)]};
    }
    for (const double x : out) e.o.push_back(sum > 0 ? x / sum : 0.0);
    e.lse.push_back(sum > 0 ? peak + std::log(sum) : -static_cast<double>(kInf));
  }

  Case of;
  KvLayout layout;
  std::vector<std::vector<float>> rows;  // [sequences][tokens, d]
  std::vector<float> q;                  // [N, Hq, d]
  std::vector<OnDevice<char>> memory;
  std::optional<OnDevice<const char*>> bases;
  std::optional<OnDevice<QueryToken>> query_tokens;
  std::optional<OnDevice<float>> queries;
  Stream stream;
  std::int64_t most_tokens = 1 << 18;  // what graphs are made for
};

double tolerance(DType type) {
  return type == DType::f32 ? 1e-5 : type == DType::f16 ? 3e-3 : 1.5e-2;
}
std::string label(const Case& c) {
  return std::string(name_of(c.type)) + " d " + std::to_string(c.d) + " heads " +
         std::to_string(c.query_heads) + "/" + std::to_string(c.kv_heads);
}
/// Of states that are not empty.
void expect_near(const Result& found, const Expected& expected, double allowed, const std::string& what) {
  LODE_CHECK_ERROR(found.o, expected.o, allowed, what);
  for (std::size_t i = 0; i < expected.lse.size(); ++i) {
    if (std::isinf(expected.lse[i]))
      LODE_CHECK(static_cast<double>(found.lse[i]) == expected.lse[i]);
    else
      LODE_CHECK_CLOSE(found.lse[i], expected.lse[i], 2e-2 * std::max(1.0, std::fabs(expected.lse[i]) / 10));
  }
}
/// Each token alone has its bits among others.
void expect_same_alone(World& world, const Result& together, const World::Lists* lists = nullptr) {
  const auto row = static_cast<std::ptrdiff_t>(world.of.query_heads * world.of.d);
  for (std::size_t t = 0; t < world.tokens(); ++t) {
    const Result alone = world.run(t, 1, lists);
    LODE_CHECK(std::equal(alone.o.begin(), alone.o.end(),
                          together.o.begin() + static_cast<std::ptrdiff_t>(t) * row));
  }
}

LODE_TEST(latent_decode_matches_float64) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const int d : {576, 288, 20, 640}) {
      for (const int heads : {1, 4, 16, 32, 40, 128}) {
        World world({.d = d,
                     .query_heads = heads,
                     .kv_heads = heads == 40 ? 4 : std::max(1, heads / 16),
                     .type = type,
                     .positions = {0, 1, 63, 64, 127, 128, 700}});
        world.upload();
        const Result found = world.run(0, world.tokens());
        expect_near(found, world.expected(), tolerance(type), label(world.of));
        expect_same_alone(world, found);
      }
    }
  }
}

LODE_TEST(latent_decode_of_many_keys_does_not_depend_on_what_a_graph_is_made_for) {
  for (const int heads : {16, 32, 128}) {
    World world({.query_heads = heads, .kv_heads = heads / 16, .positions = {9000, 17000, 3}});
    world.upload();
    const Result many = world.run(0, 3);
    expect_near(many, world.expected(), tolerance(DType::bf16), label(world.of));
    world.most_tokens = 17001;
    LODE_CHECK(world.run(0, 3).o == many.o);
    world.most_tokens = 500;  // fewer than there are: slow, not wrong
    LODE_CHECK(world.run(0, 3).o == many.o);
  }
}

/// Lists of all lengths, with or without order.
World::Lists lists_for(const World& world, int per_head, bool weights, bool tail) {
  World::Lists lists = {.per_head = per_head, .sink = 3, .window = 37};
  const int count = world.of.kv_heads * per_head;
  unsigned seed = 11;
  for (const int position : world.of.positions) {
    for (int i = 0; i < count; ++i) {
      std::vector<std::int32_t> far;
      for (int key = 3; key < position + 1 - 37; ++key) far.push_back(key);
      std::shuffle(far.begin(), far.end(), std::mt19937(++seed));
      const std::size_t wanted[] = {far.size(), 0, 1, 64, far.size() / 3};
      far.resize(std::min(far.size(), wanted[static_cast<std::size_t>(i) % 5]));
      if (weights) lists.weights.push_back(test::normal(far.size(), ++seed));
      lists.rows.push_back(far);
    }
  }
  if (tail) {
    const std::size_t states = world.tokens() * static_cast<std::size_t>(world.of.query_heads);
    lists.tail_output = test::normal(states * static_cast<std::size_t>(world.of.d), 5);
    lists.tail_lse = test::normal(states, 6);
    for (std::size_t i = 0; i < states; i += 3) lists.tail_lse[i] = -kInf;
  }
  return lists;
}

LODE_TEST(latent_lists_match_float64) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const int d : {576, 288, 20}) {
      for (const bool apart : {false, true}) {
        for (const bool more : {false, true}) {
          World world(
              {.d = d, .query_heads = 10, .kv_heads = 2, .type = type, .positions = {0, 5, 300, 3000, 900}});
          world.upload();
          const World::Lists lists = lists_for(world, apart ? 5 : 1, more, more);
          const Result found = world.run(0, world.tokens(), &lists);
          expect_near(found, world.expected(&lists), tolerance(type), label(world.of));
          expect_same_alone(world, found, &lists);
        }
      }
    }
  }
}

LODE_TEST(latent_lists_of_nothing_give_the_empty_state) {
  World world({.positions = {100}});
  world.upload();
  const World::Lists lists = {.rows = {{}}};
  const Result found = world.run(0, 1, &lists);
  LODE_CHECK(std::ranges::all_of(found.o, [](float x) { return x == 0.0f; }));
  LODE_CHECK(std::ranges::all_of(found.lse, [](float x) { return x == -kInf; }));
}

LODE_TEST(latent_scores_of_thousands_and_rows_that_are_alike) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    World large({.type = type, .positions = {5, 400, 2000}, .deviation = 8.0f});  // scores of a thousand
    large.upload();
    expect_near(large.run(0, 3), large.expected(), 10 * tolerance(type), label(large.of));
    World alike({.type = type, .positions = {5, 400, 2000}});
    for (std::vector<float>& rows : alike.rows)
      for (std::size_t i = static_cast<std::size_t>(alike.of.d); i < rows.size(); ++i)
        rows[i] = rows[i - static_cast<std::size_t>(alike.of.d)];
    alike.upload();
    expect_near(alike.run(0, 3), alike.expected(), tolerance(type), label(alike.of));
  }
}

LODE_TEST(latent_nan_and_infinity_are_not_hidden) {
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const float bad : {std::nanf(""), kInf}) {
      World world({.type = type, .positions = {900, 900}});
      world.rows[0][static_cast<std::size_t>(500 * world.of.d + 9)] = bad;
      world.upload();
      const Result found = world.run(0, 2);
      const std::size_t half = found.o.size() / 2;
      for (int head = 0; head < world.of.query_heads; ++head) {
        const auto at = static_cast<std::size_t>(head * world.of.d + 9);
        if (std::isnan(bad))
          LODE_CHECK(std::isnan(found.o[at]) && std::isnan(found.lse[static_cast<std::size_t>(head)]));
      }
      LODE_CHECK(std::all_of(found.o.begin() + static_cast<std::ptrdiff_t>(half), found.o.end(),
                             [](float x) { return std::isfinite(x); }));
    }
  }
}

/// The last tokens of one sequence, which attend to all before them: as decode of each would, in float64.
struct Prefill {
  Prefill(const Case& c, int count_) : count(count_), world(c) {
    const int last = c.positions.front();
    for (int i = 0; i < count; ++i) places.push_back({0, last - count + 1 + i});
    q = test::normal(static_cast<std::size_t>(count * c.query_heads * c.d), 21, c.deviation);
    world.upload();
  }
  Result run(int chunk, Precision precision) {
    const OnDevice<float> there(q), o(test::poison(q.size())),
        lse(test::poison(static_cast<std::size_t>(count * world.of.query_heads)));
    const OnDevice<QueryToken> tokens(places);
    for (int first = 0; first < count; first += chunk) {
      const std::int64_t row = std::int64_t{first} * world.of.query_heads;
      attend_prefill({.tokens = tokens.get() + first,
                      .bases = world.bases->get(),
                      .layer_offset = 0,
                      .layout = world.layout,
                      .count = std::min(chunk, count - first),
                      .query_heads = world.of.query_heads,
                      .scale = world.scale(),
                      .q = there.get() + row * world.of.d,
                      .o = o.get() + row * world.of.d,
                      .lse = lse.get() + row},
                     places[static_cast<std::size_t>(first)].position, world.stream.get(), precision);
    }
    world.stream.synchronize();
    return {o.read(world.stream), lse.read(world.stream)};
  }
  Expected expected(Precision precision) const {
    Case c = world.of;
    c.positions.clear();
    for (const QueryToken& token : places) c.positions.push_back(token.position);
    World each(c);
    each.q = q;
    if (precision == Precision::exact) each.of.type = DType::f32;  // queries are not rounded
    for (std::size_t i = 0; i < each.rows.size(); ++i)
      each.rows[i].assign(world.rows[0].begin(),
                          world.rows[0].begin() + std::int64_t{places[i].position + 1} * c.d);
    return each.expected();
  }
  int count;
  World world;
  std::vector<QueryToken> places;
  std::vector<float> q;
};

LODE_TEST(latent_prefill_matches_float64_however_it_is_cut) {
  for (const Precision precision : {Precision::fast, Precision::exact}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const int d : {576, 288, 20}) {
        for (const int heads : {3, 16, 40}) {
          for (const auto& [tokens, count] : {std::pair{1, 1}, {33, 33}, {200, 45}}) {
            Prefill prefill({.d = d,
                             .query_heads = heads,
                             .kv_heads = heads == 40 ? 4 : 1,
                             .type = type,
                             .positions = {tokens - 1}},
                            count);
            const Result found = prefill.run(count, precision);
            const bool exact = precision == Precision::exact || type == DType::f32;
            expect_near(found, prefill.expected(precision), exact ? 1e-5 : tolerance(type),
                        label(prefill.world.of));
            for (const int chunk : {1, 9}) LODE_CHECK(prefill.run(chunk, precision).o == found.o);
          }
        }
      }
    }
  }
}

/// Tokens that choose together: a list a KV head in front of the keys that are near.
LODE_TEST(latent_lists_of_many_tokens_match_float64) {
  for (const Precision precision : {Precision::fast, Precision::exact}) {
    for (const auto& [type, d] : {std::pair{DType::bf16, 576}, {DType::f32, 576}, {DType::bf16, 128}}) {
      const int count = 50, sink = 3, window = 40, kv_heads = 2;
      Prefill prefill({.d = d, .query_heads = 20, .kv_heads = kv_heads, .type = type, .positions = {899}},
                      count);
      const int first = prefill.places[0].position, near = first + 1 - window;
      std::vector<std::int32_t> rows, counts;
      for (const int every : {3, 1000}) {  // the second head has none
        const std::size_t before = rows.size();
        for (int key = sink; key < near && every < near; key += every) rows.push_back(key);
        counts.push_back(static_cast<std::int32_t>(rows.size() - before));
        rows.resize(before + 400, 1 << 30);
      }
      Case c = prefill.world.of;
      c.positions.clear();
      World::Lists lists = {.sink = sink};
      for (const QueryToken& token : prefill.places) {
        c.positions.push_back(token.position);
        for (int h = 0; h < kv_heads; ++h) {
          const auto begin = rows.begin() + h * 400;
          lists.rows.emplace_back(begin, begin + counts[static_cast<std::size_t>(h)]);
          for (int key = near; key <= token.position; ++key) lists.rows.back().push_back(key);
        }
      }
      World each(c);
      each.q = prefill.q;
      if (precision == Precision::exact) each.of.type = DType::f32;  // queries are not rounded
      for (std::vector<float>& all : each.rows) all = prefill.world.rows[0];
      const OnDevice<std::int32_t> rows_there(rows), counts_there(counts);
      const OnDevice<QueryToken> tokens(prefill.places);
      const OnDevice<float> q(prefill.q), o(test::poison(prefill.q.size())),
          lse(test::poison(static_cast<std::size_t>(count * c.query_heads)));
      const OnDevice<char> workspace(
          std::vector<char>(static_cast<std::size_t>(rows_prefill_workspace_bytes(c.d))));
      attend_rows_prefill({.tokens = tokens.get(),
                           .bases = prefill.world.bases->get(),
                           .layer_offset = 0,
                           .layout = prefill.world.layout,
                           .count = count,
                           .query_heads = c.query_heads,
                           .scale = each.scale(),
                           .q = q.get(),
                           .o = o.get(),
                           .lse = lse.get()},
                          first,
                          {.rows = rows_there.get(),
                           .counts = counts_there.get(),
                           .capacity = 400,
                           .sink = sink,
                           .window = window},
                          workspace.get(), prefill.world.stream.get(), precision);
      const bool exact = precision == Precision::exact || type == DType::f32;
      expect_near({o.read(prefill.world.stream), lse.read(prefill.world.stream)}, each.expected(&lists),
                  exact ? 1e-5 : tolerance(type), label(c));
    }
  }
}

/// A document that several tokens read at once: the merge of its parts is what each would have of it alone.
LODE_TEST(latent_rows_of_a_document_that_tokens_share) {
  for (const DType type : {DType::bf16, DType::f32}) {
    const int count = 5, keys = 1500, heads = 32;
    World world({.query_heads = heads, .kv_heads = 2, .type = type, .positions = {keys - 1}});
    world.upload();
    const std::size_t states = std::size_t{count} * heads, d = 576;
    const std::vector<float> q = test::normal(states * d, 31);
    const OnDevice<float> there(q);
    const OnDevice<QueryToken> tokens(std::vector<QueryToken>(count, {0, 4000}));
    const OnDevice<char> workspace(
        std::vector<char>(static_cast<std::size_t>(shared_workspace_bytes(count, heads, 576))));
    const StatePlanes planes = attend_shared({.tokens = tokens.get(),
                                              .bases = world.bases->get(),
                                              .layer_offset = 0,
                                              .layout = world.layout,
                                              .count = count,
                                              .query_heads = heads,
                                              .scale = world.scale(),
                                              .q = there.get()},
                                             keys, workspace.get(), world.stream.get(), Precision::fast);
    const OnDevice<float> o(test::poison(states * d)), lse(test::poison(states));
    merge_parts(planes.outputs, planes.lse, planes.count, static_cast<std::int64_t>(states), 576, o.get(),
                lse.get(), world.stream.get());
    Case c = world.of;
    c.positions.assign(count, keys - 1);
    World each(c);
    each.q = q;
    for (std::vector<float>& rows : each.rows) rows = world.rows[0];
    expect_near({o.read(world.stream), lse.read(world.stream)}, each.expected(), tolerance(type), label(c));
  }
}

LODE_TEST(kernels_that_know_where_values_lie_do_not_take_latent_rows) {
  for (const int d : {64, 128}) {
    const KvLayout apart = {1, d, DType::bf16, 0}, latent = {1, d, DType::bf16, 0, true};
    LODE_CHECK(can_attend_runs(apart, 4) && !can_attend_runs(latent, 4));
    LODE_CHECK(!can_attend_arriving({.layout = latent, .count = 1, .query_heads = 4}));
  }
}

// ---- Around attention.

LODE_TEST(products_of_each_head_with_its_own_matrix) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const int cols : {128, 20, 512}) {
      const int heads = 5, rows = 70, stride = cols + 24, tokens = 37, split = cols / 2;
      const std::vector<float> x = test::normal(static_cast<std::size_t>(tokens * heads * stride), 1);
      std::vector<float> w = test::normal(static_cast<std::size_t>(heads * rows * cols), 2);
      for (float& v : w) v = test::rounded(v, type);
      const OnDevice<float> x_there(x);
      const OnDevice<char> w_there(test::encode(w, type));
      HeadProduct p = {
          .input = {.x = x_there.get(), .stride = stride, .first = 7, .split = split, .second = split + 19},
          .heads = heads,
          .w = {.data = w_there.get(), .type = type, .rows = heads * rows, .cols = cols}};
      const Stream stream;
      const OnDevice<char> scratch(
          std::vector<char>(static_cast<std::size_t>(heads_scratch_bytes(tokens, heads, cols))));
      const auto run = [&](int first, int count, const auto& multiply) {
        const OnDevice<float> y(test::poison(static_cast<std::size_t>(count * heads * rows)));
        HeadProduct some = p;
        some.input.x += first * heads * stride;
        some.tokens = count;
        some.y = y.get();
        multiply(some);
        return y.read(stream);
      };
      std::vector<double> expected;
      for (int slot = 0; slot < tokens * heads; ++slot) {
        for (int r = 0; r < rows; ++r) {
          double sum = 0;
          for (int c = 0; c < cols; ++c)
            sum += double{x[static_cast<std::size_t>(slot * stride + p.input.place(c))]} *
                   double{w[static_cast<std::size_t>((slot % heads * rows + r) * cols + c)]};
          expected.push_back(sum);
        }
      }
      const auto check = [&](const auto& multiply, double allowed) {
        const std::vector<float> all = run(0, tokens, multiply);
        LODE_CHECK_ERROR(all, expected, allowed, std::string(name_of(type)) + " " + std::to_string(cols));
        for (const auto& [first, count] : {std::pair{0, 1}, {5, 3}, {20, 17}}) {
          const std::vector<float> some = run(first, count, multiply);
          LODE_CHECK(
              std::equal(some.begin(), some.end(), all.begin() + std::ptrdiff_t{first} * heads * rows));
        }
      };
      check([&](const HeadProduct& some) { multiply_heads_few(some, stream.get()); }, 1e-6);
      check(
          [&](const HeadProduct& some) {
            multiply_heads(some, Precision::exact, scratch.get(), stream.get());
          },
          1e-6);
      check(
          [&](const HeadProduct& some) {
            multiply_heads(some, Precision::fast, scratch.get(), stream.get());
          },
          type == DType::bf16 ? 5e-3 : 1e-3);
    }
  }
}

/// Where a row's numbers lie before they turn: the turning ones in front of either half.
std::vector<double> together(const LatentShape& s, const std::vector<double>& latent,
                             const std::vector<double>& turning) {
  std::vector<double> row;
  const auto add = [&](const std::vector<double>& from, int first, int count, int step) {
    for (int i = 0; i < count; ++i) row.push_back(from[static_cast<std::size_t>(first + i * step)]);
  };
  for (const int half : {0, 1}) {
    add(turning, s.interleaved ? half : half * (s.rope / 2), s.rope / 2, s.interleaved ? 2 : 1);
    const int first = half == 0 ? 0 : s.in_half();
    add(latent, first, half == 0 ? s.in_half() : s.kv_rank - s.in_half(), 1);
  }
  return row;
}
void turn(const LatentShape& s, int position, const std::vector<float>& frequencies, double factor,
          std::vector<double>& row) {
  for (int i = 0; i < s.rope / 2; ++i) {
    double &a = row[static_cast<std::size_t>(i)], &b = row[static_cast<std::size_t>(i + s.row() / 2)];
    const double angle = static_cast<double>(static_cast<float>(position) *
                                             frequencies[static_cast<std::size_t>(i)]),
                 x = a, y = b;
    a = factor * (x * std::cos(angle) - y * std::sin(angle));
    b = factor * (y * std::cos(angle) + x * std::sin(angle));
  }
}

LODE_TEST(queries_and_latent_rows_are_put_together) {
  for (const bool interleaved : {true, false}) {
    for (const LatentShape& s : {LatentShape{512, 64, 128, interleaved}, LatentShape{16, 4, 8, interleaved},
                                 LatentShape{10, 6, 4, interleaved}}) {
      const int heads = 4, kv_heads = 2, tokens = 3, row = s.row();
      const KvLayout layout = {kv_heads, row, DType::f32, 0, true};
      const std::vector<float> q = test::normal(static_cast<std::size_t>(tokens * heads * (s.nope + s.rope)),
                                                1),
                               folded = test::normal(static_cast<std::size_t>(tokens * heads * s.kv_rank), 2),
                               kv = test::normal(static_cast<std::size_t>(tokens * row), 3),
                               gain = test::normal(static_cast<std::size_t>(s.kv_rank), 4);
      std::vector<float> frequencies(static_cast<std::size_t>(row / 2), 0.0f);
      for (int i = 0; i < s.rope / 2; ++i)
        frequencies[static_cast<std::size_t>(i)] = 1.0f / static_cast<float>(1 + i);
      const std::vector<QueryToken> places = {{0, 5}, {0, 6}, {0, 131}};
      const Stream stream;
      const OnDevice<float> q_there(q), folded_there(folded), kv_there(kv), gain_there(gain),
          turns(frequencies);
      const OnDevice<float> store(test::poison(static_cast<std::size_t>(layout.layer_bytes(256) / 4)));
      const OnDevice<const char*> bases({reinterpret_cast<const char*>(store.get())});
      const OnDevice<QueryToken> places_there(places);
      const auto room = [&](int n) {
        return OnDevice<float>(test::poison(static_cast<std::size_t>(tokens * n * row)));
      };
      const OnDevice<float> q_out = room(heads), q_plain = room(heads), k_out = room(kv_heads),
                            k_plain = room(kv_heads), v_out = room(kv_heads);
      put_latent_rows(
          {.shape = s,
           .q = q_there.get(),
           .folded = folded_there.get(),
           .kv = kv_there.get(),
           .kv_norm = {.data = gain_there.get(), .type = DType::f32, .rows = 1, .cols = s.kv_rank},
           .eps = 1e-5f,
           .frequencies = turns.get(),
           .rope_scale = 1.25f,
           .q_out = q_out.get(),
           .q_unrotated = q_plain.get(),
           .k_out = k_out.get(),
           .k_unrotated = k_plain.get(),
           .v_out = v_out.get()},
          {.tokens = places_there.get(),
           .bases = bases.get(),
           .layout = layout,
           .count = tokens,
           .query_heads = heads},
          stream.get());
      const auto part = [](const std::vector<float>& from, int first, int count) {
        return std::vector<double>(from.begin() + first, from.begin() + first + count);
      };
      std::vector<double> queries, plain, keys, plain_keys;
      std::vector<float> stored;
      const std::vector<float> all = store.read(stream);
      for (int t = 0; t < tokens; ++t) {
        const int position = places[static_cast<std::size_t>(t)].position;
        for (int h = 0; h < heads; ++h) {
          const int at = t * heads + h;
          std::vector<double> x = together(s, part(folded, at * s.kv_rank, s.kv_rank),
                                           part(q, at * (s.nope + s.rope) + s.nope, s.rope));
          plain.insert(plain.end(), x.begin(), x.end());
          turn(s, position, frequencies, 1.25, x);
          queries.insert(queries.end(), x.begin(), x.end());
        }
        std::vector<double> latent = part(kv, t * row, s.kv_rank);
        double squares = 0;
        for (const double x : latent) squares += x * x;
        for (int i = 0; i < s.kv_rank; ++i)
          latent[static_cast<std::size_t>(i)] *=
              double{gain[static_cast<std::size_t>(i)]} / std::sqrt(squares / s.kv_rank + 1e-5);
        std::vector<double> x = together(s, latent, part(kv, t * row + s.kv_rank, s.rope));
        for (int h = 0; h < kv_heads; ++h) plain_keys.insert(plain_keys.end(), x.begin(), x.end());
        turn(s, position, frequencies, 1.25, x);
        for (int h = 0; h < kv_heads; ++h) keys.insert(keys.end(), x.begin(), x.end());
        const auto begin = all.begin() + layout.key_offset(1, position) / 4;
        for (int h = 0; h < kv_heads; ++h) stored.insert(stored.end(), begin, begin + row);
      }
      const std::string what = std::to_string(row) + (interleaved ? " interleaved" : "");
      LODE_CHECK_ERROR(q_plain.read(stream), plain, 1e-6, what);
      LODE_CHECK_ERROR(q_out.read(stream), queries, 1e-6, what);
      LODE_CHECK_ERROR(k_plain.read(stream), plain_keys, 1e-6, what);
      for (const std::vector<float>& found : {k_out.read(stream), v_out.read(stream), stored})
        LODE_CHECK_ERROR(found, keys, 1e-6, what);
    }
  }
}

}  // namespace
}  // namespace lode::cuda
