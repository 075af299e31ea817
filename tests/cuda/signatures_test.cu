// SPDX-License-Identifier: Apache-2.0
// Signatures of keys and queries against exact integer networks, and selection by them against a sort: bit
// order, ties, budgets 0, 1, all but one, all, more; depth and combined; groups that share signatures or have
// their own; ragged lengths; keys signed one by one or together; choice and attention in one launch against
// the two of them.
#include <algorithm>
#include <bit>
#include <numeric>
#include <span>
#include <string>

#include "harness.h"
#include "kernels/cuda/attend/arriving.cuh"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/hash/signatures.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;
using Words = std::vector<std::uint32_t>;
using Mode = SignatureRule::Mode;

struct Case {
  int kv_heads = 2, group = 4, words = 1;
  bool own_sets = false, per_query_head = false, all_ties = false;
  Mode mode = Mode::count;
  int depth = 0;
  std::int64_t sink = 0, window = 1, capacity = 4096;
  int query_heads() const { return kv_heads * group; }
  int sets() const { return own_sets ? query_heads() : kv_heads; }
};

Rows nearest(const std::vector<int>& distance, const Case& c, std::int64_t budget) {
  Rows order(distance.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int i) { return distance[static_cast<std::size_t>(i)]; };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return at(a) != at(b) ? at(a) < at(b) : a > b; });
  const auto n = std::ssize(order);
  const bool counted = c.mode != Mode::depth;
  std::int64_t take = counted ? std::clamp<std::int64_t>(budget, 0, n) : n;
  while (c.all_ties && take > 0 && take < n &&
         at(order[static_cast<std::size_t>(take)]) == at(order[static_cast<std::size_t>(take - 1)]))
    ++take;
  if (c.mode != Mode::count && n > 0) {
    const int limit = at(order[0]) + c.depth;
    while (take > 0 && at(order[static_cast<std::size_t>(take - 1)]) > limit) --take;
  }
  order.resize(static_cast<std::size_t>(std::min<std::int64_t>(take, c.capacity)));
  for (auto& row : order) row += static_cast<std::int32_t>(c.sink);
  std::sort(order.begin(), order.end());
  return order;
}

std::int64_t padded(std::int64_t tokens) {
  return (tokens + kSignatureUnit - 1) / kSignatureUnit * kSignatureUnit;
}

/// Signatures of sequences one behind the other, behind those of another layer.
struct OnePlace {
  OnDevice<std::uint32_t> codes;
  OnDevice<SignatureSets> apart;
  OnePlace(const Words& of_layer, std::int64_t sequence, std::int64_t room)
      : codes(behind_another(of_layer, sequence)),
        apart(std::vector<SignatureSets>{{codes.get(), room}, {codes.get() + sequence, room}}) {}
  /// Room for a unit more, which the last range of a sequence reads.
  static Words behind_another(const Words& of_layer, std::int64_t sequence) {
    Words all(static_cast<std::size_t>(sequence), 0x5a5a5a5a);
    all.insert(all.end(), of_layer.begin(), of_layer.end());
    all.resize(all.size() + 4 * kSignatureUnit, 0x5a5a5a5a);
    return all;
  }
};

/// Two query tokens of two sequences, one of them shorter.
struct Asked {
  Case c;
  std::int64_t tokens, budget;
  const Words &codes, &queries;
  std::int64_t room() const { return padded(tokens); }
  std::int64_t sequence() const { return c.sets() * room() * c.words; }
  int lists() const { return c.per_query_head ? c.query_heads() : c.kv_heads; }
  std::vector<QueryToken> places() const {
    return {{0, static_cast<std::int32_t>(tokens - 1)}, {1, static_cast<std::int32_t>(tokens * 3 / 4)}};
  }
};
using Lists = std::vector<Rows>;  // [queries * lists]

Lists lists_of(const Asked& a, const Rows& rows, const Rows& counts, std::int32_t first) {
  Lists lists;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto begin = rows.begin() + static_cast<std::int64_t>(i) * a.c.capacity;
    lists.emplace_back(begin, begin + std::max(0, counts[i]));
    for (auto& row : lists.back()) row += first;
  }
  return lists;
}

/// What is chosen, with `ranks` one after the other, whose ranges begin at these rows (one alone: at 0). `apart`: the
/// sequences are documents whose signatures need not lie side by side.
Lists chosen(const Asked& a, const std::vector<std::int64_t>& begins, bool apart) {
  const Case& c = a.c;
  const int ranks = static_cast<int>(begins.size()), lists = 2 * a.lists();
  Stream stream;
  const OnePlace place(a.codes, a.sequence(), a.room());
  const OnDevice<std::uint32_t> queries(a.queries);
  const OnDevice<std::int32_t> budgets(Rows(2, static_cast<std::int32_t>(a.budget)));
  const SignatureRule whole = {.mode = c.mode,
                               .budget = budgets.get(),
                               .depth = c.depth,
                               .all_ties = c.all_ties,
                               .per_query_head = c.per_query_head,
                               .sink = c.sink,
                               .window = c.window};
  const int levels = signature_levels(whole, {.words = c.words, .per_query_head = c.own_sets}, c.group);
  const OnDevice<std::int32_t> told(Rows(static_cast<std::size_t>(ranks * lists * levels), -7));
  Lists all(static_cast<std::size_t>(lists));
  for (const bool tells : {true, false}) {
    if (tells && ranks == 1) continue;
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t begin = begins[static_cast<std::size_t>(r)];
      std::vector<QueryToken> places = a.places();
      SignatureRule rule = whole;
      if (r > 0) rule.sink = 0;
      if (r + 1 < ranks) rule.window = 0;
      for (QueryToken& p : places)
        p.position = static_cast<std::int32_t>(
            (r + 1 < ranks ? begins[static_cast<std::size_t>(r + 1)] - 1 : p.position) - begin);
      const OnDevice<QueryToken> places_device(places);
      const OnDevice<std::int32_t> rows(Rows(static_cast<std::size_t>(lists * c.capacity), -7)),
          counts(Rows(static_cast<std::size_t>(lists), -7));
      SignatureRanks of;
      if (ranks > 1) of = {.rank = r, .ranks = ranks};
      if (tells) of.own = told.get() + std::int64_t{r} * lists * levels;
      if (!tells && ranks > 1) of.all = told.get();
      select_by_signature({.tokens = places_device.get(),
                           .layout = {c.kv_heads, 64, DType::f16, 0},
                           .count = 2,
                           .query_heads = c.query_heads()},
                          nullptr, {}, queries.get(),
                          {.codes = apart ? nullptr : place.codes.get() + a.sequence() + begin * c.words,
                           .sequence_stride = a.sequence(),
                           .capacity = apart ? 0 : a.room(),
                           .words = c.words,
                           .per_query_head = c.own_sets,
                           .apart = apart ? place.apart.get() : nullptr,
                           .first_set = c.sets()},
                          rule, a.tokens, rows.get(), c.capacity, counts.get(), stream.get(), of);
      const Lists own = lists_of(a, rows.read(stream), counts.read(stream), static_cast<std::int32_t>(begin));
      for (std::size_t i = 0; i < own.size(); ++i) all[i].insert(all[i].end(), own[i].begin(), own[i].end());
    }
  }
  return all;
}

/// Against the sort.
void expect_nearest(const Case& c, std::int64_t tokens, std::int64_t budget, const Words& codes,
                    const Words& queries, const std::string& what, bool apart,
                    const std::vector<std::int64_t>& begins = {0}) {
  const Asked asked = {c, tokens, budget, codes, queries};
  const Lists found = chosen(asked, begins, apart);
  const int lists = asked.lists(), together = c.per_query_head ? 1 : c.group;
  for (int query = 0; query < 2; ++query) {
    const std::int64_t end = asked.places()[static_cast<std::size_t>(query)].position + 1 - c.window;
    for (int list = 0; list < lists; ++list) {
      std::vector<int> distance(static_cast<std::size_t>(std::max<std::int64_t>(0, end - c.sink)), 0);
      for (int head = list * together; head < (list + 1) * together; ++head) {
        const int set = c.own_sets ? head : head / c.group;
        for (std::size_t i = 0; i < distance.size(); ++i) {
          for (int w = 0; w < c.words; ++w) {
            const auto key = static_cast<std::int64_t>(i) + c.sink;
            distance[i] += std::popcount(
                codes[static_cast<std::size_t>(query * asked.sequence() +
                                               (set * asked.room() + key) * c.words + w)] ^
                queries[static_cast<std::size_t>((query * c.query_heads() + head) * c.words + w)]);
          }
        }
      }
      const Rows expected = nearest(distance, c, budget);
      const std::size_t at = static_cast<std::size_t>(query * lists + list);
      if (found[at] != expected)
        test::fail(__FILE__, __LINE__,
                   what + ", tokens " + std::to_string(tokens) + ", budget " + std::to_string(budget) +
                       ", list " + std::to_string(at) + ": expected " + std::to_string(expected.size()) +
                       " rows, found " + std::to_string(found[at].size()) + " or others");
    }
  }
}

/// Few different signatures make many ties.
Words random_words(std::int64_t count, unsigned seed, std::uint32_t mask) {
  std::mt19937 engine(seed);
  Words words(static_cast<std::size_t>(count));
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(engine()) & mask;
  return words;
}

void expect_case(Case c, const std::string& what) {
  for (const std::int64_t tokens : {1, 2, 700, 5003, 20001}) {
    const std::int64_t n = std::max<std::int64_t>(0, tokens - c.window - c.sink);
    c.capacity = std::max<std::int64_t>(1, n);
    for (const std::uint32_t mask : {0u, 0x11u, ~0u}) {
      const Words codes = random_words(2 * c.sets() * padded(tokens) * c.words, 1, mask),
                  queries = random_words(2 * c.query_heads() * c.words, 2, ~0u);
      for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{1}, n / 32, n - 1, n, n + 5})
        expect_nearest(c, tokens, budget, codes, queries, what, budget == n / 32);
      if (tokens < 5000) continue;  // GPUs with ranges of these keys: what one chooses
      for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{1}, n / 32, n})
        expect_nearest(c, tokens, budget, codes, queries, what + ", in ranges", false, {0, 128, 128, 2560});
    }
  }
}

LODE_TEST(near_keys_of_a_group) {
  for (const int words : {1, 2, 4}) expect_case({.words = words}, "words " + std::to_string(words));
  for (const int group : {1, 2, 3, 7, 8, 16}) {
    expect_case({.kv_heads = 1, .group = group, .sink = 3, .window = 17}, "group " + std::to_string(group));
    expect_case({.kv_heads = 1, .group = group, .words = 4, .sink = 3},
                "wide group " + std::to_string(group));
  }
}
LODE_TEST(near_keys_of_query_heads) {
  expect_case({.per_query_head = true}, "shared keys");
  expect_case({.own_sets = true, .per_query_head = true}, "own keys");
  expect_case({.own_sets = true}, "own keys, together");
  expect_case({.words = 4, .own_sets = true}, "own wide keys, together");
}
LODE_TEST(near_keys_by_depth) {
  for (const int depth : {0, 3, 8, 200}) {
    for (const Mode mode : {Mode::depth, Mode::combined}) {
      for (const bool all_ties : {false, true})
        expect_case({.group = 3, .all_ties = all_ties, .mode = mode, .depth = depth}, "by depth");
      expect_case({.group = 4, .mode = mode, .depth = depth}, "by depth, pairs");
    }
  }
  expect_case({.all_ties = true}, "all ties");
}
LODE_TEST(near_keys_beyond_the_capacity) {
  Case c = {.capacity = 100};
  const Words codes = random_words(2 * c.sets() * padded(5000), 1, 0x1111u),
              queries = random_words(2 * c.query_heads(), 2, ~0u);
  expect_nearest(c, 5000, 100, codes, queries, "capacity", false);
  expect_nearest(c, 5000, 100, codes, queries, "capacity, apart", true);
}
/// Longer than what blocks keep in shared memory: distances are computed twice.
LODE_TEST(near_keys_of_a_long_context) {
  Case c = {.kv_heads = 2, .group = 8, .words = 4, .sink = 128, .window = 128};
  const std::int64_t tokens = 2500000;
  c.capacity = 1 << 16;
  const Words queries = random_words(2 * c.query_heads() * c.words, 2, ~0u);
  Words codes = random_words(2 * c.sets() * padded(tokens) * c.words, 1, 0x10101u);
  expect_nearest(c, tokens, 50000, codes, queries, "long", true);
}

/// Integer networks: every order of additions gives the same numbers.
struct Nets {
  SignNets shape;
  std::vector<float> weights, biases;
  Nets(std::vector<int> widths, int count, unsigned seed) {
    shape.depth = static_cast<int>(widths.size()) - 1;
    std::copy(widths.begin(), widths.end(), shape.widths);
    shape.relu = true;
    std::mt19937 engine(seed);
    weights.resize(static_cast<std::size_t>(count * shape.weights_of_net()));
    biases.resize(static_cast<std::size_t>(count * shape.biases_of_net()));
    for (float& x : weights) x = static_cast<float>(static_cast<int>(engine() % 5) - 2);
    for (float& x : biases) x = static_cast<float>(static_cast<int>(engine() % 5) - 2);
  }
  Words sign(std::int64_t net, std::vector<double> x) const {
    std::int64_t w = net * shape.weights_of_net(), b = net * shape.biases_of_net();
    for (int i = 0; i < shape.depth; ++i) {
      std::vector<double> y;
      for (int o = 0; o < shape.widths[i + 1]; ++o) {
        double sum = biases[static_cast<std::size_t>(b++)];
        for (int k = 0; k < shape.widths[i]; ++k)
          sum += weights[static_cast<std::size_t>(w++)] * x[static_cast<std::size_t>(k)];
        y.push_back(i + 1 < shape.depth ? std::max(sum, 0.0) : sum);
      }
      x = y;
    }
    Words words(x.size() / 32, 0);
    for (std::size_t i = 0; i < x.size(); ++i) words[i / 32] |= (x[i] > 0 ? 1u : 0u) << i % 32;
    return words;
  }
};

std::vector<float> whole_numbers(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(static_cast<int>(engine() % 7) - 3);
  return values;
}

/// Keys and queries through their networks, all the way to rows.
void expect_signed(DType weight_type, SignedValues values, bool own_sets, std::vector<int> widths) {
  const int kv_heads = 2, group = 2, heads = 4, d = 64, layers = 2, sets = own_sets ? heads : kv_heads;
  const std::int64_t tokens = 389, room = padded(tokens);
  const KvLayout layout = {kv_heads, d, DType::f16, KvLayout{kv_heads, d, DType::f16, 0}.layer_bytes(tokens)};
  std::vector<float> store = whole_numbers(static_cast<std::size_t>(layers * layout.layer_stride / 2), 3);
  std::vector<int> key_widths = widths;
  const int extra = values == SignedValues::vector ? d : values == SignedValues::norm ? 1 : 0;
  key_widths[0] = (d + extra + 7) / 8 * 8;
  const auto number = [&](int layer, int head, std::int64_t key, bool value, int i) -> float& {
    return store[static_cast<std::size_t>(
        (layer * layout.layer_stride + layout.key_offset(head, key) + (value ? layout.value_offset() : 0)) /
            2 +
        i)];
  };
  for (int layer = 0; layer < layers; ++layer) {  // values whose length is a whole number
    for (int head = 0; head < kv_heads && values == SignedValues::norm; ++head) {
      for (std::int64_t key = 0; key < tokens; ++key) {
        for (int i = 0; i < d; ++i) number(layer, head, key, true, i) = i == key % d ? float(key % 5) : 0.0f;
      }
    }
  }
  Nets keys(key_widths, layers * sets, 5), query_nets(widths, heads, 6);
  for (int net = 0; net < layers * sets; ++net) {  // what is not there has no weight
    for (int o = 0; o < key_widths[1]; ++o) {
      for (int i = d + extra; i < key_widths[0]; ++i)
        keys.weights[static_cast<std::size_t>(net * keys.shape.weights_of_net() + o * key_widths[0] + i)] = 0;
    }
  }
  const int words = widths.back() / 32;
  const std::int64_t layer_words = sets * room * words;
  Words expected(static_cast<std::size_t>(layers * layer_words), 0xabababab);
  for (int layer = 0; layer < layers; ++layer) {
    for (int set = 0; set < sets; ++set) {
      for (std::int64_t key = 0; key < tokens; ++key) {
        std::vector<double> x(static_cast<std::size_t>(key_widths[0]), 0);
        double length = 0;
        const int head = own_sets ? set / group : set;
        for (int i = 0; i < d; ++i) {
          x[static_cast<std::size_t>(i)] = number(layer, head, key, false, i);
          const double v = number(layer, head, key, true, i);
          length += v * v;
          if (values == SignedValues::vector) x[static_cast<std::size_t>(d + i)] = v;
        }
        if (values == SignedValues::norm) x[static_cast<std::size_t>(d)] = std::sqrt(length);
        const Words own = keys.sign(layer * sets + set, x);
        std::copy(own.begin(), own.end(),
                  expected.begin() + layer * layer_words + (set * room + key) * words);
      }
    }
  }
  Stream stream;
  const OnDevice<char> store_device(test::encode(store, DType::f16)),
      key_weights(test::encode(keys.weights, weight_type)),
      query_weights(test::encode(query_nets.weights, weight_type));
  const OnDevice<float> key_biases(keys.biases), query_biases(query_nets.biases);
  const auto on_device = [&](SignNets nets, const OnDevice<char>& w, const OnDevice<float>& b) {
    nets.weights = w.get(), nets.biases = b.get(), nets.type = weight_type;
    return nets;
  };
  const SignNets key_shape = on_device(keys.shape, key_weights, key_biases),
                 query_shape = on_device(query_nets.shape, query_weights, query_biases);
  for (const bool one_by_one : {false, true}) {
    const OnDevice<std::uint32_t> codes(Words(expected.size(), 0xabababab));
    const Signatures signatures = {
        .codes = codes.get(), .capacity = room, .words = words, .per_query_head = own_sets};
    for (std::int64_t at = 0; at < tokens; at += one_by_one ? 1 : tokens)
      sign_keys(store_device.get(), layout, layers, heads, at, one_by_one ? at + 1 : tokens, key_shape,
                values, signatures, stream.get());
    LODE_CHECK(codes.read(stream) == expected);
  }
  // Queries: their signatures, told by what is chosen among keys that have them.
  const std::vector<float> q = whole_numbers(static_cast<std::size_t>(heads * d), 9);
  Words planted = random_words(layer_words, 4, ~0u);
  for (int head = 0; head < heads; ++head) {
    const Words own =
        query_nets.sign(head, std::vector<double>(q.begin() + head * d, q.begin() + (head + 1) * d));
    for (const int key : {3, 200, 387 - head}) {  // the one key with all bits, for each head its own places
      const int set = own_sets ? head : head / group, at = key - (own_sets ? 0 : head % group);
      std::copy(own.begin(), own.end(), planted.begin() + (set * room + at) * words);
    }
  }
  const OnDevice<std::uint32_t> codes(planted);
  const std::vector<QueryToken> places = {{0, static_cast<std::int32_t>(tokens - 1)}};
  const OnDevice<QueryToken> places_device(places);
  const OnDevice<float> q_device(q);
  const OnDevice<std::int32_t> budget(Rows{3}), rows(Rows(static_cast<std::size_t>(heads) * 64, -7)),
      counts(Rows(static_cast<std::size_t>(heads), -7));
  select_by_signature({.tokens = places_device.get(), .layout = layout, .count = 1, .query_heads = heads},
                      q_device.get(), query_shape, nullptr,
                      {.codes = codes.get(), .capacity = room, .words = words, .per_query_head = own_sets},
                      {.budget = budget.get(), .per_query_head = true, .window = 1}, tokens, rows.get(), 64,
                      counts.get(), stream.get());
  const Rows found = rows.read(stream);
  for (int head = 0; head < heads; ++head) {
    const int shift = own_sets ? 0 : head % group;
    const Rows wanted = {3 - shift, 200 - shift, 387 - head - shift};
    LODE_CHECK(std::equal(wanted.begin(), wanted.end(), found.begin() + head * 64));
  }
}

LODE_TEST(signatures_of_keys_and_queries) {
  expect_signed(DType::f16, SignedValues::off, false, {64, 64, 64, 32});
  expect_signed(DType::f32, SignedValues::off, false, {64, 32});
  expect_signed(DType::f16, SignedValues::vector, true, {64, 128, 64});
  expect_signed(DType::f32, SignedValues::norm, false, {64, 40, 128});
}

/// One token whose lists are attended while they come, twice, since places must be left empty: the bits of
/// attention over lists that are there.
void expect_arriving(Queries queries, const SignNets& nets, const Signatures& signatures,
                     const SignatureRule& rule, std::int64_t tokens, std::int64_t capacity,
                     const std::int32_t* rows, const std::int32_t* counts, const Stream& stream,
                     const std::string& what) {
  const auto numbers = static_cast<std::size_t>(queries.query_heads * queries.layout.head_dim);
  const int lists = queries.layout.kv_heads;
  const OnDevice<float> expected(test::poison(numbers)), out(test::poison(numbers));
  const OnDevice<std::int32_t> places(Rows(static_cast<std::size_t>(lists * capacity), kNotYet)),
      found_counts(Rows(static_cast<std::size_t>(lists), -7));
  const Buffer workspace(decode_workspace_bytes(1, queries.query_heads, lists, queries.layout.head_dim),
                         "partial results");
  fill(workspace.as<void>(), 0, workspace.bytes(), stream.get());
  queries.count = 1, queries.o = expected.get();
  attend_rows_decode(
      queries,
      {.rows = rows, .counts = counts, .capacity = capacity, .sink = rule.sink, .window = rule.window},
      tokens, workspace.as<void>(), stream.get());
  queries.o = out.get();
  for (int turn = 0; turn < 2; ++turn) {
    if (!attend_by_signature(queries, queries.q, nets, signatures, rule, tokens,
                             {.rows = places.get(),
                              .budgets = rule.budget,
                              .capacity = capacity,
                              .sink = rule.sink,
                              .window = rule.window},
                             found_counts.get(), workspace.as<void>(), stream.get()))
      test::fail(__FILE__, __LINE__, what + ": not attended while it comes");
  }
  if (out.read(stream) != expected.read(stream))
    test::fail(__FILE__, __LINE__, what + ": other bits while lists come");
  if (places.read(stream) != Rows(static_cast<std::size_t>(lists * capacity), kNotYet))
    test::fail(__FILE__, __LINE__, what + ": places are not left empty");
}

/// The way through clusters of blocks against the other one, which gets the queries' signatures from the
/// host: the same rows. Attention in the same launch, where lists are short, against attention apart, and the
/// second query alone, whose list has more blocks then: the same bits.
void expect_in_clusters(const Case& c, const std::vector<int>& widths, std::int64_t tokens,
                        std::int64_t budget, std::uint32_t mask) {
  constexpr int d = 128, count = 2;
  const std::int64_t room = padded(tokens), sequence = c.sets() * room,
                     capacity = std::max<std::int64_t>(1, budget);
  const int heads = c.query_heads(), lists = c.per_query_head ? heads : c.kv_heads;
  const KvLayout layout = {c.kv_heads, d, DType::bf16, 0};
  Stream stream;
  const Buffer store(2 * layout.layer_bytes(tokens), "keys and values");
  fill_uniform(store.as<void>(), DType::bf16, store.bytes() / 2, 0, 1.7f, 11, stream.get());
  stream.synchronize();
  const OnDevice<const char*> bases({store.as<char>(), store.as<char>() + store.bytes() / 2});
  const OnDevice<QueryToken> places(
      {{0, static_cast<std::int32_t>(tokens - 1)}, {1, static_cast<std::int32_t>(tokens * 3 / 4)}});
  const Nets nets(widths, heads, 6);
  const std::vector<float> numbers = whole_numbers(static_cast<std::size_t>(count * heads * d), 9);
  Words own;
  for (int i = 0; i < count * heads; ++i)
    own.push_back(nets.sign(i % heads, {numbers.begin() + i * d, numbers.begin() + (i + 1) * d})[0]);
  const OnDevice<char> weights(test::encode(nets.weights, DType::f16));
  const OnDevice<float> biases(nets.biases), q(numbers), together(test::poison(numbers.size())),
      apart(test::poison(numbers.size()));
  const OnDevice<std::uint32_t> codes(random_words(count * sequence, 1, mask)), given(own);
  const Rows no_rows(static_cast<std::size_t>(count * lists * capacity), -7),
      no_counts(static_cast<std::size_t>(count * lists), -7);
  const OnDevice<std::int32_t> budgets(Rows(count, static_cast<std::int32_t>(budget))), rows(no_rows),
      other_rows(no_rows), counts(no_counts), other_counts(no_counts), attended_counts(no_counts);
  SignNets shape = nets.shape;
  shape.weights = weights.get(), shape.biases = biases.get(), shape.type = DType::f16;
  Queries queries = {.tokens = places.get(),
                     .bases = bases.get(),
                     .layout = layout,
                     .count = count,
                     .query_heads = heads,
                     .scale = 0.05f,
                     .q = q.get(),
                     .o = apart.get()};
  const Signatures signatures = {
      .codes = codes.get(), .sequence_stride = sequence, .capacity = room, .per_query_head = c.own_sets};
  const SignatureRule rule = {
      .budget = budgets.get(), .per_query_head = c.per_query_head, .sink = c.sink, .window = c.window};
  const std::string what = "group " + std::to_string(c.group) + ", tokens " + std::to_string(tokens) +
                           ", budget " + std::to_string(budget) + ", mask " + std::to_string(mask);
  if (!select_in_cluster(queries, q.get(), shape, signatures, rule, tokens, rows.get(), capacity,
                         counts.get(), stream.get()))
    return;  // not for this GPU
  select_by_signature(queries, nullptr, {}, given.get(), signatures, rule, tokens, other_rows.get(), capacity,
                      other_counts.get(), stream.get());
  if (counts.read(stream) != other_counts.read(stream) || rows.read(stream) != other_rows.read(stream))
    test::fail(__FILE__, __LINE__, what + ": other rows");
  const ArrivingRows none = {.capacity = capacity, .sink = rule.sink, .window = rule.window};
  Queries first = queries;
  first.count = 1;
  if (arrives_by_signature(first, shape, signatures, rule, none))
    expect_arriving(queries, shape, signatures, rule, tokens, capacity, rows.get(), counts.get(), stream,
                    what);
  queries.o = together.get();
  if (!attend_by_signature(queries, q.get(), shape, signatures, rule, tokens, none, attended_counts.get(),
                           nullptr, stream.get()))
    return;
  const OnDevice<float> alone(test::poison(static_cast<std::size_t>(heads * d)));
  const OnDevice<std::int32_t> count_alone(Rows(static_cast<std::size_t>(lists), -7));
  Queries second = queries;
  second.tokens += 1, second.count = 1, second.q += heads * d, second.o = alone.get();
  SignatureRule second_rule = rule;
  second_rule.budget += 1;
  if (!attend_by_signature(second, second.q, shape, signatures, second_rule, tokens, none, count_alone.get(),
                           nullptr, stream.get()))
    test::fail(__FILE__, __LINE__, what + ": not attended alone");
  const std::vector<float> both = together.read(stream);
  if (!std::ranges::equal(std::span(both).last(static_cast<std::size_t>(heads * d)), alone.read(stream)))
    test::fail(__FILE__, __LINE__, what + ": other bits alone");
  queries.o = apart.get();
  const Buffer workspace(decode_workspace_bytes(count, heads, c.kv_heads, d), "partial results");
  fill(workspace.as<void>(), 0, workspace.bytes(), stream.get());
  attend_rows_decode(queries,
                     {.rows = rows.get(),
                      .counts = counts.get(),
                      .capacity = capacity,
                      .lists_per_head = lists / c.kv_heads,
                      .sink = c.sink,
                      .window = c.window},
                     tokens, workspace.as<void>(), stream.get());
  const std::vector<float> expected = apart.read(stream);
  const double error =
      test::relative_error(together.read(stream), std::vector<double>(expected.begin(), expected.end()));
  if (attended_counts.read(stream) != other_counts.read(stream) || !(error < 6e-3))
    test::fail(__FILE__, __LINE__, what + ": attended with error " + std::to_string(error));
}

void expect_in_clusters(const Case& c, const std::vector<int>& widths,
                        std::initializer_list<std::int64_t> lengths) {
  for (const std::int64_t tokens : lengths) {
    const std::int64_t n = std::max<std::int64_t>(0, tokens - c.window - c.sink);
    for (const std::uint32_t mask : {0u, 0x11u, ~0u}) {
      for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{1}, n / 32, n})
        expect_in_clusters(c, widths, tokens, budget, mask);
    }
  }
}

LODE_TEST(near_keys_in_clusters) {
  const std::vector<int> deep = {128, 128, 128, 32};
  expect_in_clusters({.sink = 128, .window = 128}, deep, {1, 2, 700, 20001});
  expect_in_clusters({.sink = 3, .window = 17}, {128, 32}, {700, 5003});
  expect_in_clusters({.kv_heads = 1, .group = 8, .window = 1}, deep, {700, 20001});
  for (const int kv_heads : {6, 8, 12, 32, 40})  // lists of 16, 8, 4 and 2 blocks
    expect_in_clusters({.kv_heads = kv_heads, .sink = 128, .window = 128}, deep, {700, 9001});
  expect_in_clusters({.kv_heads = 6, .group = 8, .window = 30}, deep, {5003});
  expect_in_clusters({.per_query_head = true, .sink = 5, .window = 40}, deep, {300, 9001});
  expect_in_clusters({.own_sets = true, .per_query_head = true, .window = 40}, deep, {9001});
  expect_in_clusters({.sink = 100001, .window = 16}, deep,
                     {300, 700});  // a sink beyond what there is room for
}
LODE_TEST(near_keys_in_clusters_of_a_long_context) {
  for (const std::uint32_t mask : {0u, ~0u})  // counters of one level overflow a byte
    expect_in_clusters({.kv_heads = 1, .sink = 128, .window = 128}, {128, 128, 128, 32}, 1 << 20, 16384,
                       mask);
}

}  // namespace
}  // namespace lode::cuda
