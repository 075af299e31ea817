// SPDX-License-Identifier: Apache-2.0
// Prefill attention against float64: every head dimension and group, every store, chunks that start and end
// inside of tiles, scores of hundreds, NaN in later rows; that the bits do not depend on how a prompt is cut.
// The same over lists that all queries share: ragged ones, empty ones, all keys; and within sliding windows.
#include <algorithm>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/attend/attend_window.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;

/// One sequence of random keys and values in a store of two layers, behind another sequence.
struct Sequence {
  Sequence(int kv_heads, int d, DType type, std::int64_t tokens_, unsigned seed, float deviation = 1.0f)
      : layout{kv_heads, d, type, 0},
        tokens(tokens_),
        keys(test::normal(static_cast<std::size_t>(tokens * kv_heads * d), seed, deviation)),
        values(test::normal(static_cast<std::size_t>(tokens * kv_heads * d), seed + 1)) {
    layout.layer_stride = layout.layer_bytes(tokens);
    for (std::vector<float>* m : {&keys, &values}) {
      for (float& x : *m) x = test::rounded(x, type);
    }
  }
  /// Everything that is no token's is NaN.
  std::vector<char> bytes() const {
    std::vector<char> all(static_cast<std::size_t>(2 * layout.layer_stride), static_cast<char>(0xff));
    const auto d = static_cast<std::size_t>(layout.head_dim);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < layout.kv_heads; ++h) {
        const std::size_t row = static_cast<std::size_t>(t * layout.kv_heads + h) * d;
        char* at = all.data() + layout.layer_stride + layout.key_offset(h, t);
        const auto put = [&](const std::vector<float>& from, char* to) {
          const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row);
          const std::vector<char> raw = test::encode({begin, begin + layout.head_dim}, layout.type);
          std::copy(raw.begin(), raw.end(), to);
        };
        put(keys, at);
        put(values, at + layout.value_offset());
      }
    }
    return all;
  }
  KvLayout layout;
  std::int64_t tokens;
  std::vector<float> keys, values;  // [tokens, Hkv, d]
};

struct Result {
  std::vector<float> o, lse;
};

/// What the queries of a test attend in the place of all keys: a list a KV head.
struct Lists {
  std::vector<std::vector<std::int32_t>> rows;  // [Hkv]
  std::int64_t sink = 0, window = 0;
};

void attend_lists(const Queries& in, std::int32_t position, const Lists& lists, const Stream& stream,
                  Precision precision) {
  std::size_t capacity = 1;
  for (const auto& rows : lists.rows) capacity = std::max(capacity, rows.size());
  std::vector<std::int32_t> all(capacity * lists.rows.size(), 1 << 30), counts;  // no row behind a list's end
  for (std::size_t h = 0; h < lists.rows.size(); ++h) {
    std::copy(lists.rows[h].begin(), lists.rows[h].end(),
              all.begin() + static_cast<std::ptrdiff_t>(h * capacity));
    counts.push_back(static_cast<std::int32_t>(lists.rows[h].size()));
  }
  const OnDevice<std::int32_t> rows(all), counts_there(counts);
  const OnDevice<char> workspace(std::vector<char>(
      static_cast<std::size_t>(rows_prefill_workspace_bytes(in.layout.head_dim)), static_cast<char>(0xff)));
  attend_rows_prefill(in, position,
                      {.rows = rows.get(),
                       .counts = counts_there.get(),
                       .capacity = static_cast<std::int64_t>(capacity),
                       .sink = lists.sink,
                       .window = lists.window},
                      workspace.get(), stream.get(), precision);
  stream.synchronize();
}

/// The last `count` tokens attend, in chunks of at most `chunk`; with lists all at once; with a sliding window
/// to so many keys.
Result run(const Sequence& s, const std::vector<float>& q, int query_heads, int count, int chunk,
           Precision precision, const Lists* lists = nullptr, std::int64_t window = 0) {
  Stream stream;
  const int d = s.layout.head_dim;
  const OnDevice<char> store(s.bytes());
  const OnDevice<const char*> bases({nullptr, store.get()});
  const OnDevice<float> q_device(q), o(test::poison(q.size())),
      lse(test::poison(static_cast<std::size_t>(count * query_heads)));
  std::vector<QueryToken> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back({1, static_cast<std::int32_t>(s.tokens - count + i)});
  const OnDevice<QueryToken> tokens_device(tokens);
  for (int first = 0; first < count; first += chunk) {
    const std::int64_t row = std::int64_t{first} * query_heads;
    Queries in;
    in.tokens = tokens_device.get() + first;
    in.bases = bases.get();
    in.layer_offset = s.layout.layer_stride;
    in.layout = s.layout;
    in.count = std::min(chunk, count - first);
    in.query_heads = query_heads;
    in.scale = 1.0f / std::sqrt(static_cast<float>(d));
    in.q = q_device.get() + row * d;
    in.o = o.get() + row * d;
    in.lse = lse.get() + row;
    if (window > 0)
      attend_window_prefill(in, tokens[static_cast<std::size_t>(first)].position, window, stream.get(),
                            precision);
    else if (lists == nullptr)
      attend_prefill(in, tokens[static_cast<std::size_t>(first)].position, stream.get(), precision);
    else
      attend_lists(in, tokens[0].position, *lists, stream, precision);
  }
  return {o.read(stream), lse.read(stream)};
}

struct Expected {
  std::vector<double> o, lse;
};

/// The keys that a query at `position` attends.
std::vector<std::int64_t> keys_of(const Lists* lists, std::int64_t first_position, std::int64_t position,
                                  int kv_head, std::int64_t window) {
  std::vector<std::int64_t> keys;
  std::int64_t near = window > 0 ? std::max<std::int64_t>(0, position + 1 - window) : 0;
  if (lists != nullptr && first_position + 1 - lists->window > lists->sink) {
    near = first_position + 1 - lists->window;
    for (std::int64_t t = 0; t < lists->sink; ++t) keys.push_back(t);
    const auto& rows = lists->rows[static_cast<std::size_t>(kv_head)];
    keys.insert(keys.end(), rows.begin(), rows.end());
  }
  for (std::int64_t t = near; t <= position; ++t) keys.push_back(t);
  return keys;
}

Expected reference(const Sequence& s, const std::vector<float>& q, int query_heads, int count,
                   const Lists* lists = nullptr, std::int64_t window = 0) {
  const int d = s.layout.head_dim, kv_heads = s.layout.kv_heads;
  const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(d)));
  Expected e;
  for (int i = 0; i < count; ++i) {
    for (int h = 0; h < query_heads; ++h) {
      const float* query =
          q.data() + (std::size_t(i) * std::size_t(query_heads) + std::size_t(h)) * std::size_t(d);
      const std::vector<std::int64_t> keys =
          keys_of(lists, s.tokens - count, s.tokens - count + i, h / (query_heads / kv_heads), window);
      std::vector<double> p;
      double high = -1e300, sum = 0;
      const auto row = [&](const std::vector<float>& m, std::int64_t t) {
        return m.data() + (t * kv_heads + h / (query_heads / kv_heads)) * d;
      };
      for (const std::int64_t t : keys) {
        double dot = 0;
        for (int c = 0; c < d; ++c) dot += double{query[c]} * double{row(s.keys, t)[c]};
        p.push_back(dot * scale);
        high = std::max(high, p.back());
      }
      std::vector<double> out(static_cast<std::size_t>(d));
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const std::int64_t t = keys[j];
        const double weight = std::exp(p[j] - high);
        sum += weight;
        for (int c = 0; c < d; ++c) out[static_cast<std::size_t>(c)] += weight * double{row(s.values, t)[c]};
      }
      for (const double x : out) e.o.push_back(x / sum);
      e.lse.push_back(high + std::log(sum));
    }
  }
  return e;
}

double tolerance(DType type, Precision precision) {
  if (precision == Precision::exact || type == DType::f32) return 4e-6;
  return type == DType::bf16 ? 6e-3 : 1e-3;
}

void check(int query_heads, int kv_heads, int d, DType type, std::int64_t tokens, int count,
           Precision precision, float deviation = 1.0f) {
  const Sequence s(kv_heads, d, type, tokens, 91, deviation);
  const std::vector<float> q = test::normal(static_cast<std::size_t>(count * query_heads * d), 95, deviation);
  const Result found = run(s, q, query_heads, count, count, precision);
  const Expected expected = reference(s, q, query_heads, count);
  const double error = test::relative_error(found.o, expected.o),
               lse = test::relative_error(found.lse, expected.lse);
  const double allowed = tolerance(type, precision) * (deviation > 1.0f ? 10 : 1);
  if (!(error <= allowed && lse <= allowed)) {
    test::fail(__FILE__, __LINE__,
               std::string(name_of(type)) + " d " + std::to_string(d) + " heads " +
                   std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " tokens " +
                   std::to_string(tokens) + " count " + std::to_string(count) +
                   (precision == Precision::exact ? " exact" : " fast") + ": output off by " +
                   std::to_string(error) + ", lse by " + std::to_string(lse));
  }
}

/// Each head keeps another share of the far rows, in no order, the first of several none unless it is all.
void check_lists(int query_heads, int kv_heads, int d, DType type, std::int64_t tokens, int count,
                 std::int64_t sink, std::int64_t window, double share, Precision precision) {
  const Sequence s(kv_heads, d, type, tokens, 191);
  const std::vector<float> q = test::normal(static_cast<std::size_t>(count * query_heads * d), 195);
  Lists lists = {.rows = {}, .sink = sink, .window = window};
  std::mt19937 random(7);
  std::uniform_real_distribution<double> uniform;
  for (int h = 0; h < kv_heads; ++h) {
    std::vector<std::int32_t>& rows = lists.rows.emplace_back();
    for (std::int64_t t = sink; t < tokens - count + 1 - window; ++t)
      if (share >= 1.0 || uniform(random) < (h == 0 && kv_heads > 1 ? 0.0 : share * (h + 1) / kv_heads))
        rows.push_back(static_cast<std::int32_t>(t));
    std::shuffle(rows.begin(), rows.end(), random);
  }
  const Result found = run(s, q, query_heads, count, count, precision, &lists);
  const Expected expected = reference(s, q, query_heads, count, &lists);
  const double error = test::relative_error(found.o, expected.o),
               lse = test::relative_error(found.lse, expected.lse), allowed = tolerance(type, precision);
  if (!(error <= allowed && lse <= allowed)) {
    test::fail(__FILE__, __LINE__,
               std::string(name_of(type)) + " d " + std::to_string(d) + " heads " +
                   std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " tokens " +
                   std::to_string(tokens) + " count " + std::to_string(count) + " share " +
                   std::to_string(share) + (precision == Precision::exact ? " exact" : " fast") +
                   ": output off by " + std::to_string(error) + ", lse by " + std::to_string(lse));
  }
  LODE_CHECK(run(s, q, query_heads, count, count, precision, &lists).o == found.o);
  if (share < 1.0) return;
  const Result full = run(s, q, query_heads, count, count, precision);
  LODE_CHECK(test::relative_error(full.o, {found.o.begin(), found.o.end()}) <= 2 * allowed);
}

/// Whole and in chunks, which must not change a bit.
void check_window(int query_heads, int kv_heads, int d, DType type, std::int64_t tokens, int count,
                  std::int64_t window, Precision precision) {
  const Sequence s(kv_heads, d, type, tokens, 291);
  const std::vector<float> q = test::normal(static_cast<std::size_t>(count * query_heads * d), 295);
  const Result found = run(s, q, query_heads, count, count, precision, nullptr, window);
  const Expected expected = reference(s, q, query_heads, count, nullptr, window);
  const double error = test::relative_error(found.o, expected.o),
               lse = test::relative_error(found.lse, expected.lse), allowed = tolerance(type, precision);
  if (!(error <= allowed && lse <= allowed))
    test::fail(__FILE__, __LINE__,
               std::string(name_of(type)) + " d " + std::to_string(d) + " tokens " + std::to_string(tokens) +
                   " count " + std::to_string(count) + " window " + std::to_string(window) +
                   (precision == Precision::exact ? " exact" : " fast") + ": output off by " +
                   std::to_string(error) + ", lse by " + std::to_string(lse));
  LODE_CHECK(run(s, q, query_heads, count, 37, precision, nullptr, window).o == found.o);
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr Precision kPrecisions[] = {Precision::exact, Precision::fast};

LODE_TEST(prefill_dimensions_and_groups) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes) {
      for (const int d : {64, 80, 96, 128, 256, 512}) check(4, 2, d, type, 150, 70, precision);
      for (const int group : {1, 2, 3, 5, 7, 8, 16}) check(2 * group, 2, 64, type, 131, 40, precision);
      check(3, 1, 20, type, 77, 77, precision);  // no dimension of the matrix unit's
    }
  }
}

LODE_TEST(prefill_positions) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : {DType::f32, DType::bf16}) {
      const struct {
        int tokens, count;
      } cases[] = {{1, 1},     {2, 2},     {33, 1},  {64, 64},   {127, 127},
                   {128, 128}, {129, 129}, {257, 3}, {400, 271}, {640, 130}};
      for (const auto& c : cases)
        for (const int d : {128, 512}) check(4, 1, d, type, c.tokens, c.count, precision);
    }
  }
}

LODE_TEST(prefill_large_scores) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes)
      for (const int d : {128, 512}) check(2, 1, d, type, 200, 64, precision, 6.0f);  // scores of hundreds
  }
}

/// Of heads of d numbers.
void check_chunks(Precision precision, DType type, int d) {
  const int tokens = 300, count = 300, heads = 6;
  const Sequence s(2, d, type, tokens, 101);
  const std::vector<float> q = test::normal(static_cast<std::size_t>(count * heads * d), 105);
  const Result whole = run(s, q, heads, count, count, precision);
  for (const int chunk : {1, 7, 64, 100}) {
    const Result cut = run(s, q, heads, count, chunk, precision);
    LODE_CHECK(cut.o == whole.o && cut.lse == whole.lse);
  }
}

LODE_TEST(prefill_chunks_give_the_same_bits) {
  for (const Precision precision : kPrecisions)
    for (const DType type : kTypes)
      for (const int d : {64, 512}) check_chunks(precision, type, d);
}

/// NaN in a key or a value reaches every query that sees it; in float32 no other (on the matrix unit a
/// weight of zero does not keep out the NaN of a later value in the same tile).
void check_nan(Precision precision, bool in_key, int d) {
  const int tokens = 200, count = 120, heads = 2;
  Sequence s(1, d, DType::bf16, tokens, 111);
  (in_key ? s.keys : s.values)[static_cast<std::size_t>(150 * d + d - 1)] = std::nanf("");
  const std::vector<float> q = test::normal(static_cast<std::size_t>(count * heads * d), 115);
  const Result found = run(s, q, heads, count, count, precision);
  for (std::size_t i = 0; i < found.o.size(); ++i) {
    const auto width = static_cast<std::size_t>(d);
    const std::size_t position = 80 + i / (heads * width);
    const bool expected = position >= 150 && (in_key || i % width == width - 1);
    if (expected || precision == Precision::exact || position < 128)
      LODE_CHECK(std::isnan(found.o[i]) == expected);
  }
}

LODE_TEST(prefill_nan_is_not_hidden) {
  for (const Precision precision : kPrecisions)
    for (const bool in_key : {true, false})
      for (const int d : {64, 512}) check_nan(precision, in_key, d);
}

LODE_TEST(window_prefill) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes) {
      for (const int d : {64, 80, 96, 128, 256, 512}) check_window(4, 2, d, type, 500, 300, 130, precision);
      check_window(3, 1, 20, type, 177, 90, 33, precision);  // no dimension of the matrix unit's
    }
    const struct {
      int tokens, count, window;
    } cases[] = {{300, 300, 1},  {300, 300, 300}, {300, 300, 5000}, {129, 129, 128},
                 {700, 400, 16}, {1000, 20, 512}, {1000, 1, 64},    {900, 700, 255}};
    for (const auto& c : cases)
      for (const int d : {64, 128})
        check_window(8, 2, d, DType::bf16, c.tokens, c.count, c.window, precision);
  }
}

LODE_TEST(rows_prefill_dimensions_and_groups) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes) {
      for (const int d : {64, 80, 128, 256, 512}) check_lists(4, 2, d, type, 900, 70, 3, 40, 0.4, precision);
      for (const int group : {1, 4, 8}) check_lists(2 * group, 2, 128, type, 700, 45, 0, 100, 0.5, precision);
      check_lists(3, 1, 20, type, 177, 33, 2, 9, 0.9, precision);  // no dimension of the matrix unit's
    }
  }
}

LODE_TEST(rows_prefill_positions_and_shares) {
  for (const Precision precision : kPrecisions) {
    const struct {
      int tokens, count, sink, window;
      double share;
    } cases[] = {{1, 1, 0, 1, 0.5},        {40, 40, 4, 8, 0.5},      {300, 300, 1, 100, 1.0},
                 {301, 200, 4, 97, 1.0},   {1000, 40, 0, 1, 0.0},    {1000, 129, 4, 128, 0.3},
                 {1153, 128, 0, 1, 1.0},   {1700, 300, 16, 30, 1.0}, {3000, 64, 16, 100, 0.1},
                 {2500, 257, 0, 100, 0.8}, {513, 1, 0, 1, 1.0}};
    for (const auto& c : cases) {
      check_lists(4, 2, 128, DType::bf16, c.tokens, c.count, c.sink, c.window, c.share, precision);
      check_lists(2, 2, 64, DType::bf16, c.tokens, c.count, c.sink, c.window, c.share, precision);
    }
  }
  // Enough blocks that lists are not cut.
  check_lists(32, 32, 128, DType::bf16, 900, 260, 0, 100, 0.5, Precision::fast);
}

}  // namespace
}  // namespace lode::cuda
