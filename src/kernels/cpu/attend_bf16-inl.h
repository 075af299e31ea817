// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of bf16 by products of pairs of bf16 (AVX512-BF16): nothing is widened, one
// instruction multiplies two numbers a lane. Included by table_avx512bf16.cc after attend-inl.h, whose rows
// and order of keys it keeps.
//
//   per block of kBlock keys:  S[g, i] = q_g . k_i      up to four queries: sixteen keys in the lanes, two
//                                                       columns at a time transposed in registers; eight:
//                                                       queries in the lanes, nothing transposed. No sum has
//                                                       to be folded
//                              m, P = softmax step      P[g, i] = exp(S[g, i] - m_g), rounded to bf16
//                              O[g, :] += P[g, i] v_i   two keys at a time, their columns interleaved
//
// Precision: queries and weights are rounded to bf16, as for every matrix unit. The weights' sum is taken of
// what they were rounded to, so that they add up to 1. Sums are float32. The instruction takes denormal
// numbers for 0.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lode {
namespace {

constexpr int kPairs = 8;             // pairs of columns that are transposed together
constexpr int kColumns = 2 * kPairs;  // their columns
constexpr int kWideColumns = 2 * kW;  // columns of a register of bf16
constexpr int kMostTogether = 8;      // queries that share registers
constexpr int kLineBytes = 64;        // of memory
constexpr int kQuad = 4;              // columns of two pairs
constexpr int kPass = 64;             // queries that share one pass over memory

/// Registers of kWideColumns columns that hold d.
inline int registers_of(int d) {
  return (d + kWideColumns - 1) / kWideColumns;
}

/// Which of the chunks that go through one block this is, and how many they are: each asks the memory for its share of
/// the next block, so that the memory is never asked for much at once.
struct Asker {
  int index, count;
};

/// Asks the memory for one asker's share of `lines` lines, from `line` on, of the `next` rows behind n of them, in the
/// order of addresses; ask() is called `lines` times, or about so often. Rows of a run lie one behind the other.
template <class Rows>
class LinesAhead {
 public:
  LinesAhead(const std::byte* part, const KvRows& kv, Rows rows, int n, int next, int line, int lines,
             Asker asker)
      : part_(part),
        row_bytes_(std::int64_t{bytes_of(DType::bf16)} * kv.d),
        rows_(rows.from(n)),
        next_(next),
        lines_(registers_of(kv.d)),
        of_(asker.count) {
    line += lines * asker.index / asker.count;
    row_ = line / lines_, line_ = line % lines_;
  }
  LODE_INLINE void ask() {
    if (++turn_ < of_) return;
    turn_ = 0;
    if (row_ < next_) __builtin_prefetch(part_ + rows_[row_] * row_bytes_ + line_ * kLineBytes);
    if (++line_ == lines_) line_ = 0, ++row_;
  }

 private:
  const std::byte* part_;
  std::int64_t row_bytes_;
  Rows rows_;
  int next_, lines_, of_, row_, line_, turn_ = 0;
};
template <>
class LinesAhead<RunRows> {
 public:
  LinesAhead(const std::byte* part, const KvRows& kv, RunRows rows, int n, int next, int line, int lines,
             Asker asker)
      : at_(part + rows[next > 0 ? n : 0] * bytes_of(DType::bf16) * kv.d +
            (line + lines * asker.index / asker.count) * kLineBytes),
        step_(kLineBytes / asker.count) {}
  /// The same line again and again costs less than to count.
  LODE_INLINE void ask() {
    __builtin_prefetch(at_);
    at_ += step_;
  }

 private:
  const std::byte* at_;
  std::int64_t step_;
};

/// Where eight_scores puts key i: of each four keys the even ones, then the odd ones.
constexpr int at_eight(int i) {
  return ((i / 4 * 2 + i % 2) * 2 + i % 4 / 2) * kMostTogether;
}

/// acc += the products of a pair of each lane with the one at `pair`. The compiler would spread that over a
/// register first.
LODE_INLINE void add_pair(__m512i lanes, const std::uint32_t* pair, __m512& acc) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(lanes), "m"(*pair));
}

LODE_INLINE void add_pairs(__m512i a, __m512i b, __m512& acc) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

/// Where pair n of query g of G lies among pairs of all: queries side by side if they share a register, else
/// one after the other.
template <int G>
constexpr int at_pair(int g, int n) {
  return G == kMostTogether ? n * G + g : g * kW + n;
}

/// Queries as add_pair reads them: [ceil(d / kColumns), kPairs, G] pairs, zeros beyond d. Those of a group of
/// kMostTogether two pairs of columns at a time: [.., kPairs / 2, G, 2].
template <int G>
void pack_pairs(const float* q /*[G, d]*/, int d, std::uint32_t* packed) {
  for (int c = 0; c < d; c += kColumns, packed += kPairs * G) {
    for (int g = 0; g < G; ++g) {
      const Vec own = load_first(q + std::int64_t{g} * d + c, d - c < kColumns ? d - c : kColumns);
      const __m256bh rounded = _mm512_cvtneps_pbh(own.x);
      std::uint32_t pairs[kPairs];
      std::memcpy(pairs, &rounded, sizeof pairs);
      for (int j = 0; j < kPairs; ++j)
        packed[G == kMostTogether ? (j / 2 * G + g) * 2 + j % 2 : j * G + g] = pairs[j];
    }
  }
}

/// Lane n of x[j] becomes pair j of the `count` columns (kColumns at most) at rows[n] + at.
LODE_INLINE void load_pairs(const std::byte* const* rows, std::int64_t at, int count, __m512i (&x)[kPairs]) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  unroll<kPairs>([&](auto n) LODE_INLINE_LAMBDA {
    constexpr int row = n < 4 ? n : n + 4;
    const auto half = [&](int r) LODE_INLINE_LAMBDA { return _mm256_maskz_loadu_epi16(mask, rows[r] + at); };
    x[n] = _mm512_inserti64x4(_mm512_castsi256_si512(half(row)), half(row + 4), 1);
  });
  transpose(x);
}

/// s[g, i] = q_g . k_i for n keys, -inf up to kBlock. Asks the memory for the keys of the `next` rows behind
/// them meanwhile, a line for each pair of columns.
template <int G, class Rows>
LODE_NOINLINE void pair_scores(const std::uint32_t* packed, const KvRows& kv, Rows rows, int n, int next,
                               float* s /*[G, kBlock]*/) {
  constexpr int kSixteens = kBlock / kW;
  const int d = kv.d;
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const std::byte *at[kBlock], *ahead[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    at[i] = kv.k + rows[i < n ? i : n - 1] * row_bytes;
    ahead[i] = i < next ? kv.k + rows[n + i] * row_bytes : at[i];
  }
  const int steps = (d + kColumns - 1) / kColumns;
  // Lines are asked for in the order of addresses, of each row a power of two.
  const int shift = std::bit_width(static_cast<unsigned>(d < kWideColumns ? 1 : d / kWideColumns)) - 1;
  for (int i = 0; i < kBlock; i += kSixteens * kW) {
    if (i >= n) {
      for (int g = 0; g < G; ++g) store(s + g * kBlock + i, set1(kMinusInfinity));
      break;
    }
    // Pairs go to two sums by turns: one would have each product wait for the one before.
    __m512 acc[kSixteens][2][G];
    unroll<kSixteens>([&](auto b) LODE_INLINE_LAMBDA {
      unroll<G>([&](auto g) LODE_INLINE_LAMBDA { acc[b][0][g] = acc[b][1][g] = _mm512_setzero_ps(); });
    });
    const std::uint32_t* q = packed;
    unsigned asked = i / kW * steps * kPairs;
    for (int c = 0; c < d; c += kColumns, q += kPairs * G, asked += kSixteens * kPairs) {
      const int count = d - c < kColumns ? d - c : kColumns;
      unroll<kSixteens>([&](auto b) LODE_INLINE_LAMBDA {
        __m512i x[kPairs];
        load_pairs(at + i + b * kW, std::int64_t{c} * bytes_of(DType::bf16), count, x);
        unroll<kPairs>([&](auto j) LODE_INLINE_LAMBDA {
          const unsigned line = asked + b * kPairs + j;
          __builtin_prefetch(ahead[(line >> shift) % kBlock] + line % (1u << shift) * kLineBytes);
          unroll<G>([&](auto g) LODE_INLINE_LAMBDA { add_pair(x[j], q + j * G + g, acc[b][j % 2][g]); });
        });
      });
    }
    unroll<kSixteens>([&](auto b) LODE_INLINE_LAMBDA {
      const int first = i + b * kW, left = n - first;
      const __mmask16 mask = left >= kW ? 0xffff : left > 0 ? first_lanes(left) : 0;
      unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
        const __m512 sum = _mm512_add_ps(acc[b][0][g], acc[b][1][g]);
        _mm512_storeu_ps(s + g * kBlock + first,
                         _mm512_mask_blend_ps(mask, _mm512_set1_ps(kMinusInfinity), sum));
      });
    });
  }
}

/// What one chunk of G queries carries from block to block.
struct PairState {
  float* sums;                 // [registers_of(d), G, 2, kW]: outputs, see take_outputs
  float* m;                    // [G]
  float* l_acc;                // [G, kW], see at_pair: sums so far, one per pair of keys modulo kW
  float alpha[kMostTogether];  // what sums so far must be multiplied by for the block at hand
  float base[kMostTogether];   // m, or 0 for -inf, so that exp(-inf - -inf) does not occur
};

/// Raises the maximum of query g to that of a block, and scales the sum of its weights so far.
LODE_INLINE void raise_maximum(Vec high, int g, PairState& state) {
  float& m = state.m[g];
  state.alpha[g] = 1.0f;
  state.base[g] = m == kMinusInfinity ? 0.0f : m;
  if (!any_above(high, set1(m))) return;  // maxima rise less and less often as a run goes on
  const Vec before = set1(m);
  state.base[g] = m = _mm512_reduce_max_ps(high.x);
  const Vec scale = weight_of(before - set1(m));
  state.alpha[g] = _mm512_cvtss_f32(scale.x);
  store(state.l_acc + g * kW, load(state.l_acc + g * kW) * scale);
}

/// Scores to weights, pairs of neighbouring keys: w[at_pair(g, i / 2)].
template <int G>
LODE_NOINLINE void pair_weights(const float* s /*[G, kBlock]*/, PairState& state,
                                std::uint32_t* w /*[G, kW]*/) {
  Vec high[G];
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    high[g] = max_passing_nan(max_passing_nan(set1(kMinusInfinity), load(s + g * kBlock)),
                              load(s + g * kBlock + kW));
  });
  for (int g = 0; g < G; ++g) raise_maximum(high[g], g, state);
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    const Vec base = set1(state.base[g]);
    const __m512i pairs = bits(_mm512_cvtne2ps_pbh(weight_of(load(s + g * kBlock + kW) - base).x,
                                                   weight_of(load(s + g * kBlock) - base).x));
    _mm512_storeu_si512(w + g * kW, pairs);
    const Vec even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
              odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
    store(state.l_acc + g * kW, load(state.l_acc + g * kW) + (even + odd));
  });
}

/// acc[k] += the products of eight queries with the kColumns columns (the first `count` when kPartial) at
/// key(k), for sixteen keys: fewer sums would wait for themselves. Each four numbers of a key meet two pairs
/// of every query. Calls ask() after every other key.
template <bool kPartial, class Key, class Ask>
LODE_INLINE void add_quads(const std::uint32_t* q, Key key, int count, Ask ask, __m512 (&acc)[kW]) {
  constexpr int kQuads = kColumns / kQuad;
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  __m512i x[kQuads];
  unroll<kQuads>([&](auto v) LODE_INLINE_LAMBDA { x[v] = _mm512_loadu_si512(q + v * kW); });
  unroll<kW>([&](auto k) LODE_INLINE_LAMBDA {
    const std::byte* row = key(k);
    unroll<kQuads>([&](auto v) LODE_INLINE_LAMBDA {
      const std::byte* quad = row + v * kQuad * bytes_of(DType::bf16);
      const __m128i numbers =
          kPartial ? _mm_maskz_loadu_epi16(static_cast<__mmask8>(mask >> (v * kQuad) & 0xf), quad)
                   : _mm_loadl_epi64(reinterpret_cast<const __m128i*>(quad));
      add_pairs(_mm512_broadcastq_epi64(numbers), x[v], acc[k]);
    });
    if constexpr (k % 2 == 1) ask();
  });
}

/// Calls body(key) for the sixteen rows from i on: key(k, at) is byte `at` of the k-th, of the last of n
/// beyond them. k rises from 0 for each `at`.
template <class Rows, class Body>
LODE_INLINE void for_sixteen_keys(const KvRows& kv, Rows rows, int i, int n, Body body) {
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * kv.d;
  if (std::is_same_v<Rows, RunRows> && i + kW <= n) {  // no table: products wait for loads
    const std::byte *first = kv.k + rows[i] * row_bytes, *row = first;
    body([&](int k, std::int64_t at) LODE_INLINE_LAMBDA {
      row = k == 0 ? first + at : row + row_bytes;
      asm("" : "+r"(row));  // the compiler would keep all sixteen, in vector registers
      return row;
    });
  } else {
    const std::byte* table[kW];
    for (int k = 0; k < kW; ++k) table[k] = kv.k + rows[i + k < n ? i + k : n - 1] * row_bytes;
    body([&](int k, std::int64_t at) LODE_INLINE_LAMBDA {
      const std::byte* row;
      asm volatile("mov %1, %0" : "=r"(row) : "m"(table[k]));  // as above
      return row + at;
    });
  }
}

/// s[at_eight(i) + g] = q_g . k_i for n keys, -inf up to kBlock. Asks the memory for the next keys meanwhile.
/// Even pairs of columns have one sum and odd ones another, as in pair_scores: so it gives the same bits.
template <class Rows>
LODE_NOINLINE void eight_scores(const std::uint32_t* packed, const KvRows& kv, Rows rows, int n, int next,
                                Asker asker, float* s /*[kBlock / 4, 2, 2, 8]*/) {
  const int d = kv.d;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  LinesAhead<Rows> ahead(kv.k, kv, rows, n, next, 0, kBlock * registers_of(d), asker);
  const auto ask = [&]() LODE_INLINE_LAMBDA { ahead.ask(); };
  for (int i = 0; i < n; i += kW) {
    __m512 acc[kW];
    unroll<kW>([&](auto k) LODE_INLINE_LAMBDA { acc[k] = _mm512_setzero_ps(); });
    for_sixteen_keys(kv, rows, i, n, [&](auto key) LODE_INLINE_LAMBDA {
      const std::uint32_t* q = packed;
      int c = 0;
      const auto at_c = [&](int k)
                            LODE_INLINE_LAMBDA { return key(k, std::int64_t{c} * bytes_of(DType::bf16)); };
      for (; c + kColumns <= d; c += kColumns, q += kPairs * kMostTogether)
        add_quads<false>(q, at_c, kColumns, ask, acc);
      if (c < d) add_quads<true>(q, at_c, d - c, ask, acc);
    });
    unroll<kW / 2>([&](auto t) LODE_INLINE_LAMBDA {
      constexpr int key = t / 2 * 4 + t % 2;
      const __m512 a = acc[key], b = acc[key + 2];
      const __m512 sum = _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
      _mm512_storeu_ps(s + i * kMostTogether + t * kW, sum);
    });
  }
  for (int i = n; i < kBlock; ++i) _mm256_storeu_ps(s + at_eight(i), _mm256_set1_ps(kMinusInfinity));
}

/// The same for scores of eight_scores, where each register holds two keys of every query.
LODE_NOINLINE void eight_weights(const float* s, PairState& state, std::uint32_t* w /*[kW, 8]*/) {
  const auto twice = [](const float* eight) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(eight)); };
  Vec high = set1(kMinusInfinity), other = high;
  unroll<kMostTogether>([&](auto t) LODE_INLINE_LAMBDA {
    high = max_passing_nan(high, load(s + 2 * t * kW));
    other = max_passing_nan(other, load(s + (2 * t + 1) * kW));
  });
  high = max_passing_nan(high, other);
  high = max_passing_nan(high, {_mm512_shuffle_f32x4(high.x, high.x, 0x4e)});
  Vec m = {twice(state.m)};
  Vec alpha = set1(1.0f);
  if (any_above(high, m)) {
    const __mmask16 above = _mm512_cmp_ps_mask(high.x, m.x, _CMP_GT_OQ);
    const Vec before = m;
    m = {_mm512_mask_mov_ps(m.x, above, high.x)};
    alpha = {_mm512_mask_mov_ps(alpha.x, above, weight_of(before - m).x)};
    _mm256_storeu_ps(state.m, _mm512_castps512_ps256(m.x));
    unroll<kMostTogether>(
        [&](auto t) LODE_INLINE_LAMBDA { store(state.l_acc + t * kW, load(state.l_acc + t * kW) * alpha); });
  }
  _mm256_storeu_ps(state.alpha, _mm512_castps512_ps256(alpha.x));
  const Vec base = {
      _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(m.x, _mm512_set1_ps(kMinusInfinity), _CMP_NEQ_UQ), m.x)};
  const __m512i together = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                            7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  unroll<kMostTogether>([&](auto t) LODE_INLINE_LAMBDA {
    const Vec a = weight_of(load(s + 2 * t * kW) - base), b = weight_of(load(s + (2 * t + 1) * kW) - base);
    const __m512i pairs = _mm512_permutexvar_epi16(together, bits(_mm512_cvtne2ps_pbh(b.x, a.x)));
    _mm512_storeu_si512(w + t * kW, pairs);
    const Vec even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
              odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
    store(state.l_acc + t * kW, load(state.l_acc + t * kW) + (even + odd));
  });
}

/// Two registers of neighbouring columns as interleaving pairs of rows leaves them, and back.
LODE_INLINE void to_interleaved(__m512& a, __m512& b) {
  const __m512 low = _mm512_shuffle_f32x4(a, b, 0x88);
  b = _mm512_shuffle_f32x4(a, b, 0xdd);
  a = low;
}
LODE_INLINE void from_interleaved(__m512& a, __m512& b) {
  const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
  a = _mm512_shuffle_f32x4(low, low, 0xd8);
  b = _mm512_shuffle_f32x4(high, high, 0xd8);
}

/// Calls body(low columns, their mask, high columns, their mask) for each register of a row of d numbers.
template <class Body>
LODE_INLINE void for_registers(int d, Body body) {
  for (int c = 0; c < d; c += kWideColumns) {
    const int width = d - c < kWideColumns ? d - c : kWideColumns, low = width < kW ? width : kW;
    body(c, first_lanes(low), c + kW, width == low ? __mmask16{0} : first_lanes(width - low));
  }
}

/// Outputs so far [G, d] to the sums of a chunk as add_value_pairs keeps them, zeros beyond d, and back.
template <int G>
void take_outputs(const float* o, int d, float* sums /*[registers_of(d), G, 2, kW]*/) {
  for (int g = 0; g < G; ++g, o += d) {
    float* at = sums + g * kWideColumns;
    for_registers(d, [&](int low, __mmask16 low_mask, int high, __mmask16 high_mask) LODE_INLINE_LAMBDA {
      __m512 a = _mm512_maskz_loadu_ps(low_mask, o + low), b = _mm512_maskz_loadu_ps(high_mask, o + high);
      to_interleaved(a, b);
      _mm512_storeu_ps(at, a), _mm512_storeu_ps(at + kW, b);
      at += G * kWideColumns;
    });
  }
}
template <int G>
void give_outputs(const float* sums, int d, float* o) {
  for (int g = 0; g < G; ++g, o += d) {
    const float* at = sums + g * kWideColumns;
    for_registers(d, [&](int low, __mmask16 low_mask, int high, __mmask16 high_mask) LODE_INLINE_LAMBDA {
      __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + kW);
      from_interleaved(a, b);
      _mm512_mask_storeu_ps(o + low, low_mask, a), _mm512_mask_storeu_ps(o + high, high_mask, b);
      at += G * kWideColumns;
    });
  }
}

/// sums[g, c..c + columns) = alpha_g sums + sum_i p[g, i] v_i, for V registers of kWideColumns columns (the
/// only one masked when kPartial). Asks the memory for its share of the values of the `next` rows behind them
/// meanwhile, in the order of addresses.
template <int G, int V, bool kPartial, class Rows>
LODE_NOINLINE void add_value_pairs(const std::uint32_t* w /*[G, kW]*/, const float* alpha, const KvRows& kv,
                                   Rows rows, int n, int next, Asker asker, int c,
                                   float* sums /*[registers_of(d), G, 2, kW]*/) {
  constexpr int kRegister = kWideColumns * bytes_of(DType::bf16);
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * kv.d;
  const std::byte* values = kv.v + c * bytes_of(DType::bf16);
  const auto row_mask = static_cast<__mmask32>(kPartial ? (1u << (kv.d - c)) - 1u : ~0u);
  sums += std::int64_t{c} * G;
  __m512 acc[G][V][2];
  const auto for_sums = [&](auto body) LODE_INLINE_LAMBDA {
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
      unroll<2 * V>([&](auto v) LODE_INLINE_LAMBDA {
        body(acc[g][v / 2][v % 2], sums + ((v / 2 * G + g) * 2 + v % 2) * kW, g);
      });
    });
  };
  for_sums([&](__m512& sum, const float* at, auto g)
               LODE_INLINE_LAMBDA { sum = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(alpha[g])); });
  const auto load_row = [&](int i, int v) LODE_INLINE_LAMBDA {
    const std::byte* row = values + rows[i] * row_bytes + v * kRegister;
    return kPartial ? _mm512_maskz_loadu_epi16(row_mask, row) : _mm512_loadu_si512(row);
  };
  LinesAhead<Rows> ahead(kv.v, kv, rows, n, next, c / kWideColumns * kBlock, V * kBlock, asker);
  for (int i = 0; i < n; i += 2) {
    unroll<2 * V>([&](auto) LODE_INLINE_LAMBDA { ahead.ask(); });
    __m512i low[V], high[V];
    unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
      const __m512i even = load_row(i, v);
      // A key that is not there has weight 0, and no NaN to multiply it with.
      const __m512i odd = i + 1 < n ? load_row(i + 1, v) : _mm512_setzero_si512();
      low[v] = _mm512_unpacklo_epi16(even, odd), high[v] = _mm512_unpackhi_epi16(even, odd);
    });
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
      const __m512i weights = _mm512_set1_epi32(static_cast<int>(w[at_pair<G>(g, i / 2)]));
      unroll<V>([&](auto v) LODE_INLINE_LAMBDA {
        add_pairs(low[v], weights, acc[g][v][0]);
        add_pairs(high[v], weights, acc[g][v][1]);
      });
    });
  }
  for_sums([&](__m512& sum, float* at, auto) LODE_INLINE_LAMBDA { _mm512_storeu_ps(at, sum); });
}

/// One block of n keys for one chunk of G queries. Its share of the `next` rows behind it is asked for.
template <int G, class Rows>
void attend_pairs(const std::uint32_t* q /*packed*/, const KvRows& kv, Rows rows, int n, int next,
                  Asker asker, const float* log_weights, PairState& state) {
  alignas(64) float s[G * kBlock];
  alignas(64) std::uint32_t w[G * kW];
  if constexpr (G == kMostTogether) {
    eight_scores(q, kv, rows, n, next, asker, s);
    if (log_weights)
      for (int i = 0; i < n; ++i)
        for (int g = 0; g < G; ++g) s[at_eight(i) + g] += log_weights[i];
    eight_weights(s, state, w);
  } else {
    pair_scores<G>(q, kv, rows, n, next, s);
    if (log_weights)
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < n; ++i) s[g * kBlock + i] += log_weights[i];
    pair_weights<G>(s, state, w);
  }
  constexpr int kWide = G == kMostTogether ? 1 : 2;
  for_columns<kWide, kWideColumns>(kv.d, [&]<int V, bool kPartial>(int c) {
    add_value_pairs<G, V, kPartial>(w, state.alpha, kv, rows, n, next, asker, c, state.sums);
  });
}

/// Eight queries, which nothing is transposed for, take as long as four and less than five to seven in several chunks.
inline int filled_up(int queries) {
  const int rest = queries % kMostTogether;
  if (rest == 3) return queries + 1;
  return rest > 4 ? queries - rest + kMostTogether : queries;
}

template <class Rows>
void attend_bf16(const float* q, int queries, const KvRows& kv, Rows rows, const float* log_weights,
                 std::int64_t count, const SoftmaxState& state) {
  const std::int64_t d = kv.d;
  const std::int64_t packed_row = (d + kColumns - 1) / kColumns * kPairs;  // pairs of one query
  const std::int64_t sums_row = std::int64_t{registers_of(kv.d)} * kWideColumns;
  for (int first = 0; first < queries; first += kPass) {
    const int there = queries - first < kPass ? queries - first : kPass;
    const int group = count < kWorthFilling ? there : filled_up(there);
    FilledUp<kMostTogether> filled(q + first * d, there, group, kv.d,
                                   {state.o + first * d, state.m + first, state.l + first});
    alignas(64) float l_acc[kPass * kW] = {};
    alignas(64) std::uint32_t packed[kPass * kMaxHeadDim / 2];
    alignas(64) float sums[kPass * kMaxHeadDim];
    PairState chunks[kPass];  // by first query
    for_chunks<kMostTogether>(group, [&]<int G>(int g) {
      const SoftmaxState own = filled.state(g);
      take_outputs<G>(own.o, kv.d, sums + g * sums_row);
      pack_pairs<G>(filled.q(g), kv.d, packed + g * packed_row);
      chunks[g] = {sums + g * sums_row, own.m, l_acc + g * kW, {}};
      // What came before is one more sum.
      for (int h = 0; h < G; ++h) l_acc[g * kW + at_pair<G>(h, 0)] = own.l[h];
    });
    for_blocks<DType::bf16>(kv, rows, count, [&](std::int64_t b, int n, int next) {
      for_chunks<kMostTogether>(group, [&]<int G>(int g) {
        const Asker asker = G == kMostTogether ? Asker{g / G, group / G} : Asker{0, 1};
        attend_pairs<G>(packed + g * packed_row, kv, rows.from(b), n, G == kMostTogether || g == 0 ? next : 0,
                        asker, log_weights ? log_weights + b : nullptr, chunks[g]);
      });
    });
    for_chunks<kMostTogether>(group, [&]<int G>(int g) {
      const SoftmaxState to = filled.state(g);
      give_outputs<G>(sums + g * sums_row, kv.d, to.o);
      for (int h = 0; h < G; ++h) {
        float own[kW];
        for (int n = 0; n < kW; ++n) own[n] = l_acc[g * kW + at_pair<G>(h, n)];
        to.l[h] = _mm512_reduce_add_ps(_mm512_loadu_ps(own));
      }
    });
  }
}

}  // namespace
}  // namespace lode
