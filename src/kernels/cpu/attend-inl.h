// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, for whichever vec_*.h was included before.
//
// The queries of a group are the rows of a small matrix, so that each key and value is read from memory once:
//   per block of kBlock keys:  S[i, g] = q_g . k_i        G x W/G dot products at a time, lanes folded
//   together at the end
//                              m, P = softmax step        P[i, g] = exp(S[i, g] - m_g)
//                              O[g, :] += P[i, g] v_i     O in registers, G rows by a few vectors of columns
// Memory is asked for the next block all the time, evenly: for its keys while scores are computed, for its
// values while values are added. So each row has half a block's time to arrive, wherever it lies. Rows of a list, which
// the machine cannot foresee, are asked for a block earlier, too, as far as the second-level cache: it has more requests
// under way at once.
// Queries go in chunks of G = 16, 8, 4, 2, 1; the arithmetic of one query is the same in every chunk size, so
// its bits do not depend on which queries share its pass. Three queries go as four, the last of zeros: a chunk of four
// takes less time than one of two and one of one.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/kernels.h"

namespace lode {
namespace {

constexpr int kW = Vec::kLanes;
// Keys of one softmax step. Their values and the next block wait in the first-level cache, 32 KiB or more.
constexpr int kBlock = 32;
constexpr int kMaxQueries = 16;  // queries that share one pass over memory
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Rows [begin, begin + count).
struct RunRows {
  static constexpr bool kScattered = false;
  std::int64_t begin;
  std::int64_t operator[](std::int64_t i) const { return begin + i; }
  RunRows from(std::int64_t i) const { return {begin + i}; }
};
/// rows[0..count).
struct ListRows {
  static constexpr bool kScattered = true;
  const Position* rows;
  std::int64_t operator[](std::int64_t i) const { return rows[i]; }
  ListRows from(std::int64_t i) const { return {rows + i}; }
};

/// Asks memory for bytes that are needed later than those of prefetch: as far as the second-level cache.
LODE_INLINE void prefetch_far(const std::byte* at, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
}

/// kW columns from c on (or the first n of them) of a row of d columns of type T.
template <DType T>
LODE_INLINE Vec load_columns(const std::byte* row, int c, int d) {
  if constexpr (T == DType::q4)
    return load_q4(row, c, d);
  else
    return load_as<T>(row + c * bytes_of(T));
}
template <DType T>
LODE_INLINE Vec load_columns_first(const std::byte* row, int c, int n, int d) {
  if constexpr (T == DType::q4)
    return load_q4_first(row, c, n, d);
  else
    return load_as_first<T>(row + c * bytes_of(T), n);
}

/// The queries of one chunk, as dot_group reads them: [ceil(d / kW), G, kW], zeros beyond d.
template <int G>
LODE_INLINE void pack_queries(const float* q /*[G, d]*/, int d, float* packed) {
  for (int c = 0; c < d; c += kW)
    for (int g = 0; g < G; ++g)
      store(packed + c * G + g * kW, load_first(q + std::int64_t{g} * d + c, d - c < kW ? d - c : kW));
}

/// One vector of columns of dot_group: kW / G keys against G queries.
template <int G, class LoadKey>
LODE_INLINE void dot_step(const float* q /*[G, kW]*/, LoadKey load_key, Vec (&acc)[kW]) {
  constexpr int kKeys = kW / G;
  if constexpr (kKeys <= G) {
    Vec k[kKeys];
    unroll<kKeys>([&](auto j) LODE_INLINE_LAMBDA { k[j] = load_key(j); });
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
      const Vec x = load(q + g * kW);
      unroll<kKeys>([&](auto j) LODE_INLINE_LAMBDA { acc[j * G + g] = fma(k[j], x, acc[j * G + g]); });
    });
  } else {
    Vec x[G];
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA { x[g] = load(q + g * kW); });
    unroll<kKeys>([&](auto j) LODE_INLINE_LAMBDA {
      const Vec k = load_key(j);
      unroll<G>([&](auto g) LODE_INLINE_LAMBDA { acc[j * G + g] = fma(k, x[g], acc[j * G + g]); });
    });
  }
}

/// Sums[j * G + g] = q_g . k_j for the kW / G keys at k + at[j].
template <DType T, int G>
LODE_INLINE Vec dot_group(const float* q /*packed*/, int d, const std::byte* k,
                          const std::int64_t (&at)[kW / G] /*bytes*/) {
  const std::byte* keys[kW / G];
  unroll<kW / G>([&](auto j) LODE_INLINE_LAMBDA { keys[j] = k + at[j]; });
  Vec acc[kW];
  unroll<kW>([&](auto i) LODE_INLINE_LAMBDA { acc[i] = set1(0.0f); });
  int c = 0;
  for (; c + kW <= d; c += kW) {
    dot_step<G>(
        q + c * G, [&](int j) LODE_INLINE_LAMBDA { return load_columns<T>(keys[j], c, d); }, acc);
  }
  if (const int rest = d - c; rest > 0)
    dot_step<G>(
        q + c * G, [&](int j) LODE_INLINE_LAMBDA { return load_columns_first<T>(keys[j], c, rest, d); }, acc);
  return sum_lanes(acc);
}

/// s[i * G + g] = q_g . k_i (times k_scale) for n keys; entries up to the next multiple of kW are -inf. Asks
/// the memory for the keys of the `next` rows behind them meanwhile, at most two blocks.
template <DType T, int G, class Rows>
LODE_NOINLINE void block_scores(const float* q /*packed*/, const KvRows& kv, Rows rows, int n, int next,
                                float* s) {
  constexpr int kKeys = kW / G;
  const int d = kv.d;
  const std::int64_t row_bytes = row_bytes_of(T, d);
  for (int i = 0; i < n; i += kKeys) {
    std::int64_t at[kKeys];
    unroll<kKeys>([&](auto j) LODE_INLINE_LAMBDA { at[j] = rows[i + j < n ? i + j : n - 1] * row_bytes; });
    for (int j = i; j < i + kKeys && j < next; ++j) prefetch(kv.k + rows[n + j] * row_bytes, row_bytes);
    if constexpr (Rows::kScattered)
      for (int j = i + kBlock; j < i + kBlock + kKeys && j < next; ++j)
        prefetch_far(kv.k + rows[n + j] * row_bytes, row_bytes);
    store(s + i * G, dot_group<T, G>(q, d, kv.k, at));
  }
  for (int i = n * G; i % kW != 0; ++i) s[i] = kMinusInfinity;
  if constexpr (T == DType::q8)
    for (int i = 0; i < n; ++i)
      for (int g = 0; g < G; ++g) s[i * G + g] *= kv.k_scale[rows[i]];
}

/// What one chunk of G queries carries from block to block.
struct ChunkState {
  float* o;      // [G, d]
  float* m;      // [G]
  float* l;      // [G], of what came before the run
  float* l_acc;  // [G, kW]: sums of the run, one per key modulo kW; chunk layout (see finish_sums)
  // [kW], repeating every G:
  float* top;    // m
  float* base;   // m, or 0 for -inf, so that exp(-inf - -inf) does not occur
  float* alpha;  // what sums so far must be multiplied by for the block at hand
};

/// Copies the maxima to the lanes.
template <int G>
inline void spread_maxima(const ChunkState& state) {
  for (int i = 0; i < kW; ++i) {
    const float m = state.m[i % G];
    state.top[i] = m;
    state.base[i] = m == kMinusInfinity ? 0.0f : m;
  }
}

/// Raises the maxima to those of a block and scales the sums so far.
template <int G>
LODE_NOINLINE void raise_maxima(const float* best /*[kW]*/, const ChunkState& state) {
  const Vec old = load(state.top);
  for (int i = 0; i < kW; ++i) {
    float& m = state.m[i % G];
    m = best[i] > m ? best[i] : m;
  }
  spread_maxima<G>(state);
  const Vec scale = exp_of(old - load(state.base));
  store(state.alpha, scale);
  for (int g = 0; g < G; ++g) {
    state.l[g] *= state.alpha[g];
    store(state.l_acc + g * kW, load(state.l_acc + g * kW) * scale);
  }
}

/// Scores to weights in place.
template <int G>
LODE_NOINLINE void softmax_step(float* s, int n, const ChunkState& state) {
  const int vectors = (n * G + kW - 1) / kW;
  // Two maxima at a time: one would wait for itself.
  Vec high = set1(kMinusInfinity), other = high;
  int t = 0;
  for (; t + 2 <= vectors; t += 2) {
    high = max_passing_nan(high, load(s + t * kW));
    other = max_passing_nan(other, load(s + (t + 1) * kW));
  }
  if (t < vectors) high = max_passing_nan(high, load(s + t * kW));
  alignas(64) float best[kW];
  store(best, max_passing_nan(high, other));
  store(state.alpha, set1(1.0f));
  // Maxima rise less and less often as a run goes on.
  if (any_above(load(best), load(state.top))) raise_maxima<G>(best, state);
  const Vec m = load(state.base);
  for (t = 0; t < vectors; ++t) {
    const Vec p = exp_of(load(s + t * kW) - m);
    store(s + t * kW, p);
    float* sum = state.l_acc + (t % G) * kW;
    store(sum, load(sum) + p);
  }
}

/// o[g, c..c + columns) = alpha_g o + sum_i p[i, g] v_i, for V vectors of columns (the last one masked when
/// kPartial). Asks the memory for the same columns of the `next` rows behind them meanwhile.
template <DType T, int G, int V, bool kPartial, class Rows>
LODE_NOINLINE void add_values(const float* p, const float* alpha, const KvRows& kv, Rows rows, int n,
                              int next, int c, float* o) {
  const std::int64_t d = kv.d;
  const int width = kPartial ? kv.d - c : V * kW;
  const std::int64_t row_bytes = row_bytes_of(T, d);
  // Whole lines of a row, each with the columns in which it begins.
  std::int64_t line_begin = (c * bytes_of(T) + 63) / 64 * 64, line_end = (c + width) * bytes_of(T);
  if constexpr (T == DType::q4) line_begin = 0, line_end = c == 0 ? row_bytes : 0;
  Vec acc[G][V];
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
      const float* at = o + g * d + c + v * kW;
      acc[g][v] = (kPartial ? load_first(at, width) : load(at)) * set1(alpha[g]);
    });
  });
  for (int i = 0; i < n; ++i) {
    if (i < next) prefetch(kv.v + rows[n + i] * row_bytes + line_begin, line_end - line_begin);
    if constexpr (Rows::kScattered)
      if (i + kBlock < next)
        prefetch_far(kv.v + rows[n + i + kBlock] * row_bytes + line_begin, line_end - line_begin);
    const std::byte* row = kv.v + rows[i] * row_bytes;
    Vec x[V];
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
      x[v] = kPartial ? load_columns_first<T>(row, c, width, kv.d) : load_columns<T>(row, c + v * kW, kv.d);
    });
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
      const Vec weight = set1(p[i * G + g]);
      unroll<V>([&](auto v) LODE_INLINE_LAMBDA { acc[g][v] = fma(x[v], weight, acc[g][v]); });
    });
  }
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
      float* at = o + g * d + c + v * kW;
      if (kPartial) {
        store_first(at, acc[g][v], width);
      } else {
        store(at, acc[g][v]);
      }
    });
  });
}

/// Calls body<V, kPartial>(first column) for columns [0, d), V registers of kColumns of them at a time:
/// kWide, then one, then one in part.
template <int kWide, int kColumns, class Body>
LODE_INLINE void for_columns(int d, Body body) {
  int c = 0;
  for (; c + kWide * kColumns <= d; c += kWide * kColumns) body.template operator()<kWide, false>(c);
  if constexpr (kWide > 1)
    for (; c + kColumns <= d; c += kColumns) body.template operator()<1, false>(c);
  if (c < d) body.template operator()<1, true>(c);
}

/// The values of one block, as many columns at a time as registers hold accumulators for.
template <DType T, int G, class Rows>
void add_block(const float* p, const float* alpha, const KvRows& kv, Rows rows, int n, int next, float* o) {
  constexpr int kAccumulators = kW == 16 ? 16 : 8;
  constexpr int kWide = G >= kAccumulators ? 1 : kAccumulators / G > 4 ? 4 : kAccumulators / G;
  for_columns<kWide, kW>(kv.d, [&]<int V, bool kPartial>(int c) {
    add_values<T, G, V, kPartial>(p, alpha, kv, rows, n, next, c, o);
  });
}

/// One block of at most kBlock keys for one chunk of G queries. The `next` rows behind it are asked for.
template <DType T, int G, class Rows>
void attend_block(const float* q /*packed*/, const KvRows& kv, Rows rows, int n, int next,
                  const float* log_weights, const ChunkState& state) {
  alignas(64) float s[kBlock * G + kW];
  block_scores<T, G>(q, kv, rows, n, next, s);
  if (log_weights)
    for (int i = 0; i < n; ++i)
      for (int g = 0; g < G; ++g) s[i * G + g] += log_weights[i];
  softmax_step<G>(s, n, state);
  if constexpr (T == DType::q8)
    for (int i = 0; i < n; ++i)
      for (int g = 0; g < G; ++g) s[i * G + g] *= kv.v_scale[rows[i]];
  add_block<T, G>(s, state.alpha, kv, rows, n, next, state.o);
}

/// l += the kW partial sums of each query, folded in the same order for every chunk size: the partial sum of
/// keys i = c (mod kW) lies in vector c / (kW / G) at lane (c mod kW / G) G + g.
template <int G>
inline void finish_sums(const ChunkState& state) {
  constexpr int kKeys = kW / G;
  for (int g = 0; g < G; ++g) {
    float part[kW];
    for (int c = 0; c < kW; ++c) part[c] = state.l_acc[(c / kKeys) * kW + (c % kKeys) * G + g];
    for (int half = kW / 2; half > 0; half /= 2)
      for (int c = 0; c < half; ++c) part[c] += part[c + half];
    state.l[g] += part[0];
  }
}

/// Calls body<G>(first query) for chunks of the largest power of two that fits, up to the lanes of a vector.
template <int G = kW, class Body>
LODE_INLINE void for_chunks(int queries, Body body, int first = 0) {
  for (; first + G <= queries; first += G) body.template operator()<G>(first);
  if constexpr (G > 1) for_chunks<G / 2>(queries, body, first);
}

/// Calls body(first, n, next) for blocks of `count` rows of type T: n of them, and how many the two blocks behind
/// have. Asks the memory for the first block, which nobody has asked for yet.
template <DType T, class Rows, class Body>
LODE_INLINE void for_blocks(const KvRows& kv, Rows rows, std::int64_t count, Body body) {
  const std::int64_t row_bytes = row_bytes_of(T, kv.d);
  for (const std::byte* part : {kv.k, kv.v})
    for (std::int64_t i = 0; i < count && i < kBlock; ++i) prefetch(part + rows[i] * row_bytes, row_bytes);
  for (std::int64_t b = 0; b < count; b += kBlock) {
    const std::int64_t left = count - b;
    const int n = left < kBlock ? static_cast<int>(left) : kBlock;
    body(b, n, left - n < 2 * kBlock ? static_cast<int>(left - n) : 2 * kBlock);
  }
}

/// The queries of one pass, filled up with queries of zeros to `all` of them. Those of the last chunk, which has the zeros,
/// are copies, and their states go back to where they came from in the end.
template <int kMost>
class FilledUp {
 public:
  FilledUp(const float* q, int queries, int all, int d, const SoftmaxState& state)
      : q_(q),
        state_(state),
        queries_(queries),
        d_(d),
        direct_(all == queries ? all : all - last_chunk(all)) {
    for (int g = direct_; g < all; ++g) {
      const bool there = g < queries;
      const int to = g - direct_;
      for (int c = 0; c < d; ++c) own_q_[to * d + c] = there ? q[std::int64_t{g} * d + c] : 0.0f;
      for (int c = 0; c < d; ++c) own_o_[to * d + c] = there ? state.o[std::int64_t{g} * d + c] : 0.0f;
      own_m_[to] = there ? state.m[g] : kMinusInfinity;
      own_l_[to] = there ? state.l[g] : 0.0f;
    }
  }
  ~FilledUp() {
    for (int g = direct_; g < queries_; ++g) {
      const int from = g - direct_;
      for (int c = 0; c < d_; ++c) state_.o[std::int64_t{g} * d_ + c] = own_o_[from * d_ + c];
      state_.m[g] = own_m_[from];
      state_.l[g] = own_l_[from];
    }
  }
  FilledUp(const FilledUp&) = delete;
  FilledUp& operator=(const FilledUp&) = delete;

  /// Those of the chunk that begins with query g.
  const float* q(int g) const {
    return g < direct_ ? q_ + std::int64_t{g} * d_ : own_q_ + (g - direct_) * d_;
  }
  SoftmaxState state(int g) {
    if (g < direct_) return {state_.o + std::int64_t{g} * d_, state_.m + g, state_.l + g};
    return {own_o_ + (g - direct_) * d_, own_m_ + g - direct_, own_l_ + g - direct_};
  }

 private:
  static constexpr int last_chunk(int all) {
    const int lowest = all & -all;
    return lowest < kMost ? lowest : kMost;
  }

  const float* const q_;
  const SoftmaxState state_;
  const int queries_, d_, direct_;  // [0, direct_) are where the caller has them
  alignas(64) float own_q_[kMost * kMaxHeadDim];
  alignas(64) float own_o_[kMost * kMaxHeadDim];
  float own_m_[kMost], own_l_[kMost];
};

/// How many keys pay for a copy of queries.
constexpr std::int64_t kWorthFilling = 4 * kBlock;

/// Queries as rows of type T want them, and outputs so far while rows of values are added: of q4 both are turned,
/// and outputs turned back at the end.
template <DType T>
struct Turned {
  const float* q;
  Turned(const float* q_, int /*queries*/, int /*d*/, float* /*o*/) : q(q_) {}
};
template <>
struct Turned<DType::q4> {
  alignas(64) float own[kMaxQueries * kMaxHeadDim];
  const float* q = own;
  float* o;
  int queries, d;
  Turned(const float* q_, int queries_, int d_, float* o_) : o(o_), queries(queries_), d(d_) {
    for (int i = 0; i < queries * d; ++i) own[i] = q_[i];
    for (int g = 0; g < queries; ++g) turn_q4(own + g * d, d);
    for (int g = 0; o != nullptr && g < queries; ++g) turn_q4(o + g * d, d);
  }
  ~Turned() {
    for (int g = 0; o != nullptr && g < queries; ++g) turn_back_q4(o + g * d, d);
  }
  Turned(const Turned&) = delete;
  Turned& operator=(const Turned&) = delete;
};

template <DType T, class Rows>
void attend_typed(const float* q, int queries, const KvRows& kv, Rows rows, const float* log_weights,
                  std::int64_t count, const SoftmaxState& state) {
  const std::int64_t d = kv.d;
  for (int first = 0; first < queries; first += kMaxQueries) {
    const int there = queries - first < kMaxQueries ? queries - first : kMaxQueries;
    const bool fills = T != DType::q4 && kW >= 4 && there % 4 == 3 && count >= kWorthFilling;
    const int group = fills ? there + 1 : there;
    alignas(64) float l_acc[kMaxQueries * kW] = {};
    alignas(64) float packed[kMaxQueries * kMaxHeadDim];
    const std::int64_t packed_row = (d + kW - 1) / kW * kW;
    const Turned<T> turned(q + first * d, there, kv.d, state.o + first * d);
    FilledUp<kMaxQueries> filled(turned.q, there, group, kv.d,
                                 {state.o + first * d, state.m + first, state.l + first});
    for_chunks(group, [&]<int G>(int g) { pack_queries<G>(filled.q(g), kv.d, packed + g * packed_row); });
    alignas(64) float maxima[3 * kMaxQueries * kW];
    const auto chunk_state = [&](int g) {
      const SoftmaxState own = filled.state(g);
      float* lanes = maxima + 3 * g * kW;
      return ChunkState{own.o, own.m, own.l, l_acc + g * kW, lanes, lanes + kW, lanes + 2 * kW};
    };
    for_chunks(group, [&]<int G>(int g) { spread_maxima<G>(chunk_state(g)); });
    for_blocks<T>(kv, rows, count, [&](std::int64_t b, int n, int next) {
      for_chunks(group, [&]<int G>(int g) {
        attend_block<T, G>(packed + g * packed_row, kv, rows.from(b), n, g == 0 ? next : 0,
                           log_weights ? log_weights + b : nullptr, chunk_state(g));
      });
    });
    for_chunks(group, [&]<int G>(int g) { finish_sums<G>(chunk_state(g)); });
  }
}

template <DType T, class Rows>
void score_typed(const float* q, int queries, const KvRows& kv, Rows rows, std::int64_t count, float* scores,
                 std::int64_t stride) {
  const std::int64_t d = kv.d;
  for_chunks(queries, [&]<int G>(int g) {
    alignas(64) float packed[G * kMaxHeadDim];
    alignas(64) float s[kBlock * G + kW];
    const Turned<T> turned(q + g * d, G, kv.d, nullptr);
    pack_queries<G>(turned.q, kv.d, packed);
    for (std::int64_t b = 0; b < count; b += kBlock) {
      const int n = count - b < kBlock ? static_cast<int>(count - b) : kBlock;
      block_scores<T, G>(packed, kv, rows.from(b), n, /*next=*/0, s);
      for (int h = 0; h < G; ++h)
        for (int i = 0; i < n; ++i) scores[(g + h) * stride + b + i] = s[i * G + h];
    }
  });
}

/// Calls body<T>() with the type that `type` names, one whose numbers lie side by side; of q4 only rows can be read
/// (kv_row.h).
template <class Body>
inline void for_element_type(DType type, Body body) {
  switch (type) {
    case DType::f32:
      return body.template operator()<DType::f32>();
    case DType::f16:
      return body.template operator()<DType::f16>();
    case DType::bf16:
      return body.template operator()<DType::bf16>();
    case DType::q8:
      return body.template operator()<DType::q8>();
    case DType::q4:
      return;
  }
}

/// The same for rows of keys and values, of any type.
template <class Body>
inline void for_type(DType type, Body body) {
  if (type == DType::q4) return body.template operator()<DType::q4>();
  for_element_type(type, body);
}

void attend_run(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                const SoftmaxState& state) noexcept {
  for_type(kv.type,
           [&]<DType T>() { attend_typed<T>(q, queries, kv, RunRows{begin}, nullptr, end - begin, state); });
}
void attend_rows(const float* q, int queries, const KvRows& kv, const Position* rows,
                 const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept {
  for_type(kv.type,
           [&]<DType T>() { attend_typed<T>(q, queries, kv, ListRows{rows}, log_weights, count, state); });
}
void score_run(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
               float* scores, std::int64_t stride) noexcept {
  for_type(kv.type,
           [&]<DType T>() { score_typed<T>(q, queries, kv, RunRows{begin}, end - begin, scores, stride); });
}
void score_rows(const float* q, int queries, const KvRows& kv, const Position* rows, std::int64_t count,
                float* scores, std::int64_t stride) noexcept {
  for_type(kv.type,
           [&]<DType T>() { score_typed<T>(q, queries, kv, ListRows{rows}, count, scores, stride); });
}

}  // namespace
}  // namespace lode
