// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of q8 in whole numbers, for whichever quads_*.h was included before: keys and values are
// multiplied as they are stored, four bytes a lane. Included after attend-inl.h, whose rows and order of keys it keeps.
//
//   per call:             q as 16 fixed-point bits, step max |q| / limit
//   per kWordBlock keys:  S[g, i] = q_g . k_i in whole numbers, exact; times the steps of query and key
//                         m, P = softmax step in float32
//                         W[g, i] = P[g, i] times the scale of value i, as up to 16 fixed-point bits, step max_i W[g, i] /
//                         kMostWeight: of this block alone
//                         O[g, :] += step sum_i W[g, i] v_i, the sum in whole numbers, exact
//
// Whole numbers add up to the same sum in any order, so a query's bits do not depend on how many share its pass. What
// fixed-point bits cannot hold is done in float32, for the query concerned alone: queries that are not finite or tiny by
// attend-inl.h from the start, weights of a block that are by add_slowly.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace lode {
namespace {

constexpr int kRegister = 4 * kW;    // bytes of a register
constexpr int kOutputs = 4;          // registers of columns that interleaving four rows gives
constexpr int kMostShared = kW / 2;  // queries of one chunk
constexpr int kTogetherKeys = 8;     // keys that are multiplied at once
constexpr int kPaddedHeadDim = (kMaxHeadDim + 63) / 64 * 64;
constexpr float kLeastPeak = 1e-30f;    // of a query in whole numbers
constexpr float kLeastWeight = 1e-33f;  // its inverse times kMostWeight is finite
constexpr float kLeastScale = 1e-20f;   // of values whose weights may be below kLeastWeight

/// Bytes of d columns, up to whole registers.
inline int padded(int d) {
  return (d + kRegister - 1) / kRegister * kRegister;
}

/// The largest |x| by its bits: above all numbers where one of x is not finite.
inline float peak_of(const float* x, int n) {
  std::uint32_t peak = 0;
  for (int i = 0; i < n; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  return std::bit_cast<float>(peak);
}
/// Whether a query with this peak goes as whole numbers.
inline bool fits_words(float peak) {
  return peak == 0.0f || (peak >= kLeastPeak && peak <= std::numeric_limits<float>::max());
}

/// What one chunk of G queries carries from block to block. Lanes: E = kW / G for each query, query by query.
struct QuadState {
  std::byte* q;  // [pieces, 2, kRegister], see pack_quads
  float* sums;   // [padded(d) / kRegister, kOutputs, G, kW], see quad_sums_at
  /// [G, kW]: sums of the run, one per key modulo kW: that of key i in vector i / E, lane i % E of the query.
  float* l_acc;
  std::int32_t* start;                // [kW]: what sums of scores begin with
  float *step, *top, *alpha, *scale;  // [kW]: of queries; maxima; factor of sums so far; of weights
};

/// Queries as load_query reads them: for each kRegister / G columns both registers of all G queries, zeros beyond d.
template <int G>
void pack_quads(const float* q /*[G, d]*/, const float* peaks, int there, int d, const QuadState& state) {
  constexpr int kLanes = kW / G, kPiece = kRegister / G;
  const int columns = padded(d);
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / (128 * d);
  // No sum overflows, and two signed bytes hold it.
  const float limit = most < 32639 ? static_cast<float>(most) : 32639.0f;
  for (int g = 0; g < G; ++g) {
    alignas(64) std::uint16_t words[kPaddedHeadDim];
    alignas(64) std::byte first[kPaddedHeadDim], second[kPaddedHeadDim];
    const float peak = g < there ? peaks[g] : 0.0f;
    const Vec inverse = set1(peak > 0.0f ? limit / peak : 0.0f);
    for (int c = 0; c < columns; c += kW) {
      const int n = g >= there || c >= d ? 0 : d - c < kW ? d - c : kW;
      store_words(words + c, load_first(q + (n > 0 ? std::int64_t{g} * d + c : 0), n) * inverse);
    }
    std::uint32_t sum = 0;
    for (int c = 0; c < columns; ++c) sum += static_cast<std::uint32_t>(static_cast<std::int16_t>(words[c]));
    for (int c = 0; c < columns; c += kRegister) split_query(words + c, first + c, second + c);
    for (int c = 0; c < columns; c += kPiece) {
      std::byte* to = state.q + c / kPiece * 2 * kRegister + g * kPiece;
      __builtin_memcpy(to, first + c, kPiece);
      __builtin_memcpy(to + kRegister, second + c, kPiece);
    }
    for (int e = 0; e < kLanes; ++e) {
      state.start[g * kLanes + e] = e == 0 ? static_cast<std::int32_t>(0u - kKeyOffset * sum) : 0;
      state.step[g * kLanes + e] = peak / limit;
    }
  }
}

/// Scales and log-weights of one block, zeros beyond its keys.
struct BlockScales {
  alignas(64) float k[kWordBlock], v[kWordBlock], log_weights[kWordBlock];
  bool has_log_weights;
  template <class Rows>
  void take(const KvRows& kv, Rows rows, int n, const float* weights) {
    has_log_weights = weights != nullptr;
    if (!Rows::kScattered && n % kW == 0) {
      for (int i = 0; i < n; i += kW) {
        store(k + i, load(kv.k_scale + rows[i]));
        store(v + i, load(kv.v_scale + rows[i]));
      }
    } else {
      for (int i = 0; i < kWordBlock; ++i) {
        k[i] = i < n ? kv.k_scale[rows[i]] : 0.0f;
        v[i] = i < n ? kv.v_scale[rows[i]] : 0.0f;
      }
    }
    for (int i = 0; has_log_weights && i < kWordBlock; ++i) log_weights[i] = i < n ? weights[i] : 0.0f;
  }
};

/// Folds registers of lanes of E keys until each has keys side by side: x[j] for multiples j of E.
template <int E, int kBy = 1>
LODE_INLINE void fold_keys(Int32s (&x)[kTogetherKeys]) {
  if constexpr (kBy < E && kBy < kTogetherKeys) {
    unroll<kTogetherKeys / 2 / kBy>([&](auto j) LODE_INLINE_LAMBDA {
      x[2 * kBy * j] = fold<E, kBy>(x[2 * kBy * j], x[2 * kBy * j + kBy]);
    });
    fold_keys<E, 2 * kBy>(x);
  }
}

constexpr int kPreparedKey = kPaddedHeadDim * kPreparedSize;

/// A key as load_piece reads it, zeros beyond d.
LODE_INLINE void prepare_key(const std::byte* key, int d, std::byte* to) {
  int c = 0;
  for (; c + kRegister <= d; c += kRegister) prepare(load_bytes(key + c), to + c * kPreparedSize);
  if (c < d) prepare(load_bytes_first(key + c, d - c), to + c * kPreparedSize);
}

/// Prefetch distance in bytes: past the end of the page, where the hardware's own prefetcher stops.
constexpr std::int64_t kAskAhead = 4096;

/// Prefetches the next lines of a run into the second-level cache, which has more requests under way at once.
template <int kLines>
LODE_INLINE void ask_for_lines(const std::byte*& ahead) {
  unroll<(kLines > 0 ? kLines : 1)>([&](auto) LODE_INLINE_LAMBDA {
    __builtin_prefetch(ahead, 0, 2);
    ahead += 64;
  });
}

/// Scores of the block: key i of query g in vector i / E, lane i % E of the query; -inf for keys that are not there.
/// Asks the memory for the keys of the `next` rows behind them meanwhile, of none if it is negative.
template <int G, class Rows>
LODE_NOINLINE void quad_scores(const QuadState& state, const BlockScales& scales, const KvRows& kv, Rows rows,
                               int n, int next, float* s /*[G, kWordBlock]*/) {
  constexpr int kLanes = kW / G;
  const std::int64_t d = kv.d;
  const int pieces = (kv.d * G + kRegister - 1) / kRegister;
  alignas(64) std::byte prepared[kTogetherKeys * kPreparedKey];
  const bool as_they_lie = !kPreparesAll && !Rows::kScattered && kv.d % kRegister == 0;
  const Int32s start = load_ints(state.start);
  const Vec step = load(state.step);
  const std::byte* ahead = kv.k + rows[0] * d + kAskAhead;
  const auto finish = [&](int i, Int32s x) LODE_INLINE_LAMBDA {
    Vec score = to_floats(x) * step * repeated<kLanes>(scales.k + i);
    if (scales.has_log_weights) score = score + repeated<kLanes>(scales.log_weights + i);
    store(s + i * G, score);
  };
  Int32s low = no_ints();
  for (int i = 0; i < n; i += kTogetherKeys) {
    const std::byte* first = kv.k + rows[i] * d;
    std::int64_t stride = d;
    if (!as_they_lie || i + kTogetherKeys > n) {
      for (int j = 0; j < kTogetherKeys; ++j)
        prepare_key(kv.k + rows[i + j < n ? i + j : n - 1] * d, kv.d, prepared + j * kPreparedKey);
      first = prepared, stride = kPreparedKey;
    }
    if constexpr (Rows::kScattered)
      for (int j = i; j < i + kTogetherKeys && j < next; ++j) {
        prefetch(kv.k + rows[n + j] * d, d);
        if (j + n < next) prefetch_far(kv.k + rows[n + j + n] * d, d);
      }
    Sum sum[kTogetherKeys];
    unroll<kTogetherKeys>([&](auto j) LODE_INLINE_LAMBDA { sum[j] = sum_from(start); });
    const std::byte* q = state.q;
    for (int p = 0; p < pieces; ++p) {
      if constexpr (!Rows::kScattered)
        if (next >= 0) ask_for_lines<kTogetherKeys * kRegister / 64 / G>(ahead);
      const QueryPiece own = load_query(q);
      const std::byte* key = first + piece_at<G>(p);
      unroll<kTogetherKeys>([&](auto j) LODE_INLINE_LAMBDA {
        add_scores(sum[j], load_piece<G>(key), own);
        key += stride;
        asm("" : "+r"(key));  // the compiler would keep all pointers, in vector registers
      });
      q += 2 * kRegister;
    }
    Int32s x[kTogetherKeys];
    unroll<kTogetherKeys>([&](auto j) LODE_INLINE_LAMBDA { x[j] = total(sum[j]); });
    fold_keys<kLanes>(x);
    if constexpr (kLanes > kTogetherKeys) {
      const int behind = i % kLanes;
      if (behind == 0) low = x[0];
      if (behind != 0 || i + kTogetherKeys >= n) finish(i - behind, fold<kLanes, kTogetherKeys>(low, x[0]));
    } else {
      unroll<kTogetherKeys / kLanes>([&](auto t)
                                         LODE_INLINE_LAMBDA { finish(i + t * kLanes, x[t * kLanes]); });
    }
  }
  for (int j = n; j % kW != 0; ++j)
    for (int g = 0; g < G; ++g) s[j / kLanes * kW + g * kLanes + j % kLanes] = kMinusInfinity;
}

/// op over the lanes of each query, in all of them.
template <int E, class Op, int kBy = 1>
LODE_INLINE Vec over_lanes(Vec x, Op op) {
  if constexpr (kBy < E) return over_lanes<E, Op, 2 * kBy>(op(x, swap_lanes<kBy>(x)), op);
  return x;
}

/// Finds the queries whose weights do not fit into fixed-point bits, a bit each: the largest bits of theirs are those of a
/// NaN, an infinity, or a number below 0 (-0 is the largest of all finite ones). Makes steps of the largest weights, and their inverses,
/// 0 for the queries that were found.
template <int G>
LODE_NOINLINE std::uint32_t find_slow(const BlockScales& scales, int n, float* peak /*[kW]*/,
                                      float* factor /*[kW]*/) {
  constexpr int kLanes = kW / G;
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) largest = scales.v[i] > largest ? scales.v[i] : largest;
  std::uint32_t slow = 0;
  for (int i = 0; i < kW; ++i) {
    const bool tiny = peak[i] < kLeastWeight,
               finite = !std::signbit(peak[i]) && peak[i] <= std::numeric_limits<float>::max();
    const bool held = finite && !(tiny && peak[i] > 0.0f && largest < kLeastScale);
    if (!held) slow |= 1u << i / kLanes;
    if (tiny || !held) peak[i] = kLeastWeight;
    factor[i] = held ? kMostWeight / peak[i] : 0.0f;
  }
  return slow;
}

/// Rounding offsets, one a key, which are added before fractions are cut off. If all weights were rounded to the nearest
/// number, the many keys beside a large one would lose all of their mass, or gain as much: up to half a step each. Offsets are
/// the ranks of the golden ratio's multiples: of the keys of any period, too, about as many are rounded up as ought to be.
struct RoundUp {
  alignas(64) float from[kWordBlock];
  constexpr RoundUp() : from{} {
    for (int i = 0; i < kWordBlock; ++i) {
      int smaller = 0;
      for (int j = 0; j < kWordBlock; ++j) smaller += fraction(j) < fraction(i) ? 1 : 0;
      from[i] = (static_cast<float>(smaller) + 0.5f) / kWordBlock;
    }
  }

 private:
  static constexpr double fraction(int i) {
    const double multiple = 0.6180339887498949 * i;
    return multiple - static_cast<double>(static_cast<int>(multiple));
  }
};
constexpr RoundUp kRoundUp;

/// Scores to weights times the scales of values, in place and as words; raises maxima. Returns the queries whose weights
/// words cannot hold, a bit each: their words are zeros.
template <int G>
LODE_NOINLINE std::uint32_t quad_weights(float* s, const BlockScales& scales, int n, const QuadState& state,
                                         QuadWeights<G>& w) {
  constexpr int kLanes = kW / G;
  const int vectors = (n + kW - 1) / kW * G;
  const auto higher = [](Vec a, Vec b) LODE_INLINE_LAMBDA { return max_passing_nan(a, b); };
  const auto higher_bits = [](Vec a, Vec b) LODE_INLINE_LAMBDA { return max_bits(a, b); };
  // Two maxima at a time: one would wait for itself.
  Vec high = set1(kMinusInfinity), other = high;
  int pair = 0;
  for (; pair + 2 <= vectors; pair += 2) {
    high = max_passing_nan(high, load(s + pair * kW));
    other = max_passing_nan(other, load(s + (pair + 1) * kW));
  }
  if (pair < vectors) high = max_passing_nan(high, load(s + pair * kW));
  high = over_lanes<kLanes>(max_passing_nan(high, other), higher);
  Vec top = load(state.top);
  Vec alpha = set1(1.0f);
  const Vec none = set1(kMinusInfinity);
  if (any_above(high, top)) {
    const Vec old = top;
    top = max_passing_nan(top, high);
    store(state.top, top);
    alpha = exp_of(old - where_above(top, none, top, set1(0.0f)));
    for (int g = 0; g < G; ++g) store(state.l_acc + g * kW, load(state.l_acc + g * kW) * alpha);
  }
  store(state.alpha, alpha);
  const Vec base = where_above(top, none, top, set1(0.0f));
  Vec peak = set1(0.0f);
  for (int t = 0; t < G; ++t) {
    Vec sum = load(state.l_acc + t * kW);
    for (int u = t; u < vectors; u += G) {
      const Vec p = exp_of_weight(load(s + u * kW) - base);
      sum = sum + p;
      const Vec weight = p * repeated<kLanes>(scales.v + u * kLanes);
      store(s + u * kW, weight);
      peak = max_bits(peak, weight);
    }
    store(state.l_acc + t * kW, sum);
  }
  peak = over_lanes<kLanes>(peak, higher_bits);
  std::uint32_t slow = 0;
  Vec factor = quotient(kMostWeight, peak);
  if (any_bits_outside(peak, set1(kLeastWeight), set1(std::numeric_limits<float>::infinity()))) {
    alignas(64) float peaks[kW], factors[kW];
    store(peaks, peak);
    slow = find_slow<G>(scales, n, peaks, factors);
    peak = load(peaks);
    factor = load(factors);
  }
  store(state.scale, peak * set1(1.0f / kMostWeight));
  const auto weight = [&](int t) LODE_INLINE_LAMBDA {
    return fma(load(s + t * kW), factor, repeated<kLanes>(kRoundUp.from + t * kLanes));
  };
  if constexpr (kLanes >= 4) {
    for (int t = 0; t < vectors; ++t) w.store(t, weight(t));
  } else {
    for (int t = 0; t < vectors; t += 2) w.store(t, weight(t), weight(t + 1));
  }
  return slow;
}

/// Where QuadWeights::store puts the four weights of a quad of keys.
template <int G>
constexpr int quad_weights_at(int g, int quad) {
  constexpr int kLanes = kW / G, kQuads = kLanes / 4;
  if constexpr (kQuads == 0)
    return 4 * (quad * G + g);
  else
    return quad / kQuads * kW + g * kLanes + quad % kQuads * 4;
}

/// Where the sums of columns c to c + 3, c a multiple of 4, of query g lie.
template <int G>
inline std::int64_t quad_sums_at(int g, int c) {
  const int output = c / kRegister * kOutputs + c % 16 / 4;
  return (std::int64_t{output} * G + g) * kW + c % kRegister / 16 * 4;
}

/// Sums of kOutput to kOutput + V - 1 of the columns c to c + kRegister - 1, for the first kThere of G queries. Meanwhile
/// prefetches their share of the values of the `next` rows behind them.
template <int G, int kThere, int kOutput, int V, bool kPartial, class Rows>
LODE_NOINLINE void add_quads(const QuadWeights<G>& w, const QuadState& state, const KvRows& kv, Rows rows,
                             int n, int next, int c) {
  const std::int64_t d = kv.d;
  const std::byte* values = kv.v + c;
  const int width = kPartial ? kv.d - c : kRegister;
  const std::byte *row = values + rows[0] * d, *last = values + rows[n - 1] * d;
  const std::byte* ahead =
      kv.v + rows[0] * d + kAskAhead + (c * kOutputs / kRegister + kOutput) * (n * kRegister / kOutputs);
  Sum sum[kThere][V];
  unroll<kThere * V>([&](auto i) LODE_INLINE_LAMBDA { sum[i / V][i % V] = sum_from(no_ints()); });
  for (int i = 0; i < n; i += 4) {
    Bytes x[4];
    unroll<4>([&](auto r) LODE_INLINE_LAMBDA {
      if constexpr (Rows::kScattered) row = values + rows[i + r < n ? i + r : n - 1] * d;
      x[kQuadRows[r]] = kPartial ? load_bytes_first(row, width) : load_bytes(row);
      if constexpr (!Rows::kScattered) row = row < last ? row + d : last;
    });
    if constexpr (!Rows::kScattered) {
      if (next >= 0) ask_for_lines<V * kRegister / 64>(ahead);
    } else if (c % 64 == 0) {
      unroll<4>([&](auto r) LODE_INLINE_LAMBDA {
        if constexpr (r / V == kOutput / V || V == kOutputs) {
          if (i + r < next) __builtin_prefetch(values + rows[n + i + r] * d, 0, 3);
          if (i + r + n < next) __builtin_prefetch(values + rows[n + i + r + n] * d, 0, 2);
        }
      });
    }
    Quads quads[V];
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA { quads[v] = interleave<kOutput + v>(x); });
    unroll<kThere>([&](auto g) LODE_INLINE_LAMBDA {
      const WeightPair weights = weights_of<G>(w, quad_weights_at<G>(g, i / 4));
      unroll<V>([&](auto v) LODE_INLINE_LAMBDA { add_values(sum[g][v], quads[v], weights); });
    });
  }
  float* to = state.sums + (c / kRegister * kOutputs + kOutput) * G * kW;
  unroll<kThere>([&](auto g) LODE_INLINE_LAMBDA {
    const Vec alpha = set1(state.alpha[g * (kW / G)]), scale = set1(state.scale[g * (kW / G)]);
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
      float* at = to + (v * G + g) * kW;
      store(at, fma(to_floats(total(sum[g][v])), scale, load(at) * alpha));
    });
  });
}

/// The sums of one query whose weights words cannot hold.
template <int G, class Rows>
LODE_NOINLINE void add_slowly(const float* s, int g, const QuadState& state, const KvRows& kv, Rows rows,
                              int n) {
  constexpr int kLanes = kW / G;
  for (int i = 0; i < n; ++i) {
    const float weight = s[i / kLanes * kW + g * kLanes + i % kLanes];
    const auto* row = reinterpret_cast<const std::int8_t*>(kv.v + rows[i] * kv.d);
    for (int c = 0; c < kv.d; ++c)
      state.sums[quad_sums_at<G>(g, c / 4 * 4) + c % 4] += weight * static_cast<float>(row[c]);
  }
}

/// One block of n keys for one chunk of G queries, of which kThere are there. The `next` rows behind it are asked for.
template <int G, int kThere, class Rows>
void attend_quads(const QuadState& state, const BlockScales& scales, const KvRows& kv, Rows rows, int n,
                  int next) {
  constexpr int V = G >= 8 ? 1 : G >= 4 ? 2 : kOutputs;
  alignas(64) float s[kWordBlock * G];
  QuadWeights<G> w;
  quad_scores<G>(state, scales, kv, rows, n, next, s);
  const std::uint32_t slow = quad_weights<G>(s, scales, n, state, w);
  for_columns<1, kRegister>(kv.d, [&]<int, bool kPartial>(int c) {
    unroll<kOutputs / V>([&](auto part) LODE_INLINE_LAMBDA {
      add_quads<G, kThere, part * V, V, kPartial>(w, state, kv, rows, n, next, c);
    });
  });
  for (int g = 0; slow != 0 && g < kThere; ++g)
    if ((slow >> g & 1u) != 0) add_slowly<G>(s, g, state, kv, rows, n);
}

/// Outputs of one query to sums, zeros beyond d, and back.
template <int G>
inline void take_quad_outputs(const float* o, int d, int g, float* sums) {
  for (int c = 0; c < padded(d); c += 4) {
    float* to = sums + quad_sums_at<G>(g, c);
    if (c + 4 <= d)
      __builtin_memcpy(to, o + c, 4 * sizeof *o);
    else
      for (int i = 0; i < 4; ++i) to[i] = c + i < d ? o[c + i] : 0.0f;
  }
}
template <int G>
inline void give_quad_outputs(const float* sums, int g, int d, float* o) {
  for (int c = 0; c < d; c += 4) {
    const float* from = sums + quad_sums_at<G>(g, c);
    if (c + 4 <= d)
      __builtin_memcpy(o + c, from, 4 * sizeof *o);
    else
      for (int i = 0; c + i < d; ++i) o[c + i] = from[i];
  }
}

/// Queries that all fit words, kMaxQueries at most.
template <class Rows>
void attend_words(const float* q, const float* peaks, int there, const KvRows& kv, Rows rows,
                  const float* log_weights, std::int64_t count, const SoftmaxState& state) {
  const int d = kv.d, columns = padded(d);
  const int group = there % 4 == 3 && count >= kWorthFilling ? there + 1 : there;
  alignas(64) std::byte packed[2 * kMaxQueries * kPaddedHeadDim];
  alignas(64) float sums[kMaxQueries * kPaddedHeadDim];
  alignas(64) float l_acc[kMaxQueries * kW] = {};
  alignas(64) std::int32_t start[kMaxQueries * kW];
  alignas(64) float lanes[4 * kMaxQueries * kW];
  const auto chunk_state = [&](int g) {
    float* own = lanes + 4 * g * kW;
    return QuadState{packed + 2 * g * columns,
                     sums + g * columns,
                     l_acc + g * kW,
                     start + g * kW,
                     own,
                     own + kW,
                     own + 2 * kW,
                     own + 3 * kW};
  };
  for_chunks<kMostShared>(group, [&]<int G>(int first) {
    constexpr int kLanes = kW / G;
    const QuadState own = chunk_state(first);
    pack_quads<G>(q + std::int64_t{first} * d, peaks + first, there - first, d, own);
    for (int g = 0; g < G; ++g)  // any numbers for queries that are not there
      take_quad_outputs<G>(state.o + std::int64_t{first + g < there ? first + g : first} * d, d, g, own.sums);
    for (int i = 0; i < kW; ++i) {
      const int g = first + i / kLanes;
      own.top[i] = g < there ? state.m[g] : kMinusInfinity;
      if (i % kLanes == 0 && g < there) own.l_acc[i] = state.l[g];
    }
  });
  // Keys and values of a block are a page each, which is asked for a block ahead.
  const int block = d <= 64 && kWordBlock > kBlock ? kWordBlock : kBlock;
  for (const std::byte* part : {kv.k, kv.v})
    for (std::int64_t i = 0; i < count && i < block; ++i) prefetch(part + rows[i] * d, d);
  for (std::int64_t b = 0; b < count; b += block) {
    const std::int64_t left = count - b;
    const int n = left < block ? static_cast<int>(left) : block;
    const int next = left - n < 2 * block ? static_cast<int>(left - n) : 2 * block;
    BlockScales scales;
    scales.take(kv, rows.from(b), n, log_weights ? log_weights + b : nullptr);
    for_chunks<kMostShared>(group, [&]<int G>(int first) {
      const auto attend = [&]<int kThere>() {
        attend_quads<G, kThere>(chunk_state(first), scales, kv, rows.from(b), n, first == 0 ? next : -1);
      };
      if (G == 4 && there - first == 3)
        attend.template operator()<(G == 4 ? 3 : G)>();
      else
        attend.template operator()<G>();
    });
  }
  for_chunks<kMostShared>(group, [&]<int G>(int first) {
    constexpr int kLanes = kW / G;
    const QuadState own = chunk_state(first);
    for (int g = 0; g < G && first + g < there; ++g) {
      give_quad_outputs<G>(own.sums, g, d, state.o + std::int64_t{first + g} * d);
      float part[kW];
      for (int i = 0; i < kW; ++i) part[i] = own.l_acc[i / kLanes * kW + g * kLanes + i % kLanes];
      for (int half = kW / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
      state.l[first + g] = part[0];
      state.m[first + g] = own.top[g * kLanes];
    }
  });
}

template <class Rows>
void attend_q8(const float* q, int queries, const KvRows& kv, Rows rows, const float* log_weights,
               std::int64_t count, const SoftmaxState& state) {
  for (int first = 0; first < queries;) {
    float peaks[kMaxQueries];
    int n = 0;
    for (; n < kMaxQueries && first + n < queries; ++n) {
      peaks[n] = peak_of(q + std::int64_t{first + n} * kv.d, kv.d);
      if (!fits_words(peaks[n])) break;
    }
    const auto from = [&](int query) {
      return SoftmaxState{state.o + std::int64_t{query} * kv.d, state.m + query, state.l + query};
    };
    if (n > 0)
      attend_words(q + std::int64_t{first} * kv.d, peaks, n, kv, rows, log_weights, count, from(first));
    first += n;
    if (n < kMaxQueries && first < queries) {
      attend_typed<DType::q8>(q + std::int64_t{first} * kv.d, 1, kv, rows, log_weights, count, from(first));
      ++first;
    }
  }
}

void attend_run_q8(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                   const SoftmaxState& state) noexcept {
  if (kv.type != DType::q8) return attend_run(q, queries, kv, begin, end, state);
  attend_q8(q, queries, kv, RunRows{begin}, nullptr, end - begin, state);
}
void attend_rows_q8(const float* q, int queries, const KvRows& kv, const Position* rows,
                    const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept {
  if (kv.type != DType::q8) return attend_rows(q, queries, kv, rows, log_weights, count, state);
  attend_q8(q, queries, kv, ListRows{rows}, log_weights, count, state);
}
/// The table with these two.
constexpr KernelTable with_q8(KernelTable table) {
  table.attend_run = attend_run_q8, table.attend_rows = attend_rows_q8;
  return table;
}

}  // namespace
}  // namespace lode
