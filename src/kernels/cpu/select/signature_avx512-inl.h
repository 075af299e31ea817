// SPDX-License-Identifier: Apache-2.0
// The signature kernels for AVX-512 F, BW, DQ, VL. With VPOPCNTDQ bits are counted by 32-bit words; without
// it by table look-ups of nibbles, as in signature_avx2.cc. Either way once for each digit of a group's sum,
// not once for each query; and without it, where a byte holds a word's sum, the table of a nibble gives the
// sum itself, whatever the number of queries.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cpu/simd/vec_avx512.h"
//
#include "kernels/cpu/select/signature-inl.h"

namespace lode {
namespace {

constexpr int kNumbers = 32;  // 16-bit numbers of one register

LODE_INLINE __m512i load_words(const void* p) {
  return _mm512_loadu_si512(p);
}

/// A query's words, repeated over the register.
template <int W>
LODE_INLINE __m512i repeat(const std::uint32_t* query) {
  if constexpr (W == 1) return _mm512_set1_epi32(static_cast<int>(query[0]));
  if constexpr (W == 2) {
    return _mm512_set1_epi64(static_cast<long long>(query[0] | std::uint64_t{query[1]} << 32));
  }
  if constexpr (W == 4) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(query)));
  }
}

#ifdef __AVX512VPOPCNTDQ__
/// sum + the set bits of each part of x, times 2^shift.
LODE_INLINE __m512i add_bits(__m512i sum, __m512i x, int shift) {
  return _mm512_add_epi32(sum, _mm512_sll_epi32(_mm512_popcnt_epi32(x), _mm_cvtsi32_si128(shift)));
}
/// Sums of each 32-bit word.
LODE_INLINE __m512i word_sums(__m512i counts) {
  return counts;
}
#else
LODE_INLINE __m512i add_bits(__m512i sum, __m512i x, int shift) {
  const __m128i once = _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m512i table = _mm512_broadcast_i32x4(_mm_sll_epi16(once, _mm_cvtsi32_si128(shift)));
  const __m512i low = _mm512_set1_epi8(15);
  return _mm512_add_epi8(
      sum, _mm512_add_epi8(_mm512_shuffle_epi8(table, _mm512_and_si512(x, low)),
                           _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(x, 4), low))));
}
LODE_INLINE __m512i word_sums(__m512i counts) {
  return _mm512_madd_epi16(_mm512_maddubs_epi16(counts, _mm512_set1_epi8(1)), _mm512_set1_epi16(1));
}
#endif

/// The distances of 16 keys, from the word sums of W registers.
template <int W>
LODE_INLINE __m256i key_sums(const __m512i (&words)[W]) {
  if constexpr (W == 1) return _mm512_cvtepi32_epi16(words[0]);
  if constexpr (W == 2) {
    // Two words of a key lie in one 64-bit lane; its low half is kept.
    const auto pair = [](__m512i x) {
      return _mm512_cvtepi64_epi16(_mm512_add_epi32(x, _mm512_srli_epi64(x, 32)));
    };
    return _mm256_set_m128i(pair(words[1]), pair(words[0]));
  }
  if constexpr (W == 4) {
    alignas(32) std::uint16_t sums[16];
    for (int part = 0; part < 4; ++part) {
      const __m512i x = _mm512_add_epi32(words[part], _mm512_srli_epi64(words[part], 32));
      const __m512i y = _mm512_add_epi32(x, _mm512_bsrli_epi128(x, 8));
      alignas(64) std::uint32_t lanes[16];
      _mm512_store_si512(lanes, y);
      for (int i = 0; i < 4; ++i) sums[part * 4 + i] = static_cast<std::uint16_t>(lanes[i * 4]);
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(sums));
  }
}

/// N digits.
template <int W, int N>
void distances_of(const std::uint32_t* keys, std::int64_t n, const Digit* digits, int constant, bool add,
                  std::uint16_t* distance) {
  constexpr int kKeys = 16;
  __m512i zero[N], one[N];
  unroll<N>([&](auto i) LODE_INLINE_LAMBDA {
    zero[i] = repeat<W>(digits[i].zero);
    one[i] = repeat<W>(digits[i].one);
  });
  const __m256i always = _mm256_set1_epi16(static_cast<short>(constant));
  for (std::int64_t i = 0; i < n; i += kKeys) {
    const auto left = static_cast<int>(std::min<std::int64_t>(kKeys, n - i));
    for (int part = 0; part < W; ++part) __builtin_prefetch(keys + i * W + part * 16 + kAheadWords, 0, 3);
    __m512i sum[W];
    for (int part = 0; part < W; ++part) {
      const int inside = std::clamp(left * W - part * 16, 0, 16);
      const __m512i key = _mm512_maskz_loadu_epi32(first_lanes(inside), keys + i * W + part * 16);
      sum[part] = _mm512_setzero_si512();
      unroll<N>([&](auto d) LODE_INLINE_LAMBDA {
        constexpr int kOneIfKeyElseZero = 0xca;  // of (key, one, zero)
        sum[part] = add_bits(sum[part], _mm512_ternarylogic_epi32(key, one[d], zero[d], kOneIfKeyElseZero),
                             digits[d].shift);
      });
      sum[part] = word_sums(sum[part]);
    }
    __m256i total = _mm256_add_epi16(key_sums<W>(sum), always);
    const __mmask16 some = first_lanes(left);
    if (add) total = _mm256_add_epi16(total, _mm256_maskz_loadu_epi16(some, distance + i));
    _mm256_mask_storeu_epi16(distance + i, some, total);
  }
}

template <int W, int N = kMostDigits>
void distances_of(const std::uint32_t* keys, std::int64_t n, const Digit* digits, int used, int constant,
                  bool add, std::uint16_t* distance) {
  if (used == N) return distances_of<W, N>(keys, n, digits, constant, add, distance);
  if constexpr (N > 0) distances_of<W, N - 1>(keys, n, digits, used, constant, add, distance);
}

#ifndef __AVX512VPOPCNTDQ__
constexpr int kStep = 64;  // keys whose sums of one word fill a register of bytes

/// x[r] := word w of keys 16 r to 16 r + 15.
template <int W>
LODE_INLINE void load_word(const std::uint32_t* keys, int w, __m512i (&x)[4]) {
  const __m512i every = _mm512_setr_epi32(0, W, 2 * W, 3 * W, 4 * W, 5 * W, 6 * W, 7 * W, 8 * W, 9 * W,
                                          10 * W, 11 * W, 12 * W, 13 * W, 14 * W, 15 * W);
  const __m512i pick = _mm512_add_epi32(every, _mm512_set1_epi32(w));  // its low 5 bits count
  unroll<4>([&](auto r) LODE_INLINE_LAMBDA {
    const std::uint32_t* const from = keys + r * 16 * W;
    x[r] = load_words(from);
    if constexpr (W > 1) x[r] = _mm512_permutex2var_epi32(x[r], pick, load_words(from + 16));
    if constexpr (W > 2) {
      const __m512i last = _mm512_permutex2var_epi32(load_words(from + 32), pick, load_words(from + 48));
      x[r] = _mm512_mask_blend_epi32(0xff00, x[r], last);
    }
  });
}

/// The byte sums of 64 words by the eight tables of their nibbles, in the order of the keys.
LODE_INLINE __m512i nibble_sums(const __m512i (&x)[4], const NibbleTables& tables) {
  const __m512i by_byte =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i low = _mm512_set1_epi8(15);
  __m512i y[4], plane[4];  // byte p of every key in plane p
  unroll<4>([&](auto r) LODE_INLINE_LAMBDA { y[r] = _mm512_shuffle_epi8(x[r], by_byte); });
  const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]), b = _mm512_unpacklo_epi32(y[2], y[3]),
                c = _mm512_unpackhi_epi32(y[0], y[1]), d = _mm512_unpackhi_epi32(y[2], y[3]);
  plane[0] = _mm512_unpacklo_epi64(a, b), plane[1] = _mm512_unpackhi_epi64(a, b);
  plane[2] = _mm512_unpacklo_epi64(c, d), plane[3] = _mm512_unpackhi_epi64(c, d);
  __m512i sum = _mm512_setzero_si512();
  unroll<4>([&](auto p) LODE_INLINE_LAMBDA {
    const auto table = [&](int nibble) LODE_INLINE_LAMBDA {
      return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables.sum[nibble])));
    };
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(plane[p], 4), low);
    sum = _mm512_add_epi8(sum, _mm512_shuffle_epi8(table(2 * p), _mm512_and_si512(plane[p], low)));
    sum = _mm512_add_epi8(sum, _mm512_shuffle_epi8(table(2 * p + 1), high));
  });
  // Lane l of a plane has in its word r the keys 16 r + 4 l to 16 r + 4 l + 3.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, sum);
}

template <int W>
LODE_INLINE void step_by_nibbles(const std::uint32_t* keys, const NibbleSums& sums, bool add,
                                 std::uint16_t* distance) {
  __m512i low = _mm512_set1_epi16(static_cast<short>(sums.constant)), high = low;
  const __m128i shift = _mm_cvtsi32_si128(sums.shift);
  unroll<W>([&](auto w) LODE_INLINE_LAMBDA {
    __m512i x[4];
    load_word<W>(keys, w, x);
    const __m512i bytes = nibble_sums(x, sums.words[w]);
    const auto widen = [&](__m256i half)
                           LODE_INLINE_LAMBDA { return _mm512_sll_epi16(_mm512_cvtepu8_epi16(half), shift); };
    low = _mm512_add_epi16(low, widen(_mm512_castsi512_si256(bytes)));
    high = _mm512_add_epi16(high, widen(_mm512_extracti64x4_epi64(bytes, 1)));
  });
  if (add) {
    low = _mm512_add_epi16(low, load_words(distance));
    high = _mm512_add_epi16(high, load_words(distance + kNumbers));
  }
  _mm512_storeu_si512(distance, low);
  _mm512_storeu_si512(distance + kNumbers, high);
}

template <int W>
void distances_by_nibbles(const std::uint32_t* keys, std::int64_t n, const NibbleSums& sums, bool add,
                          std::uint16_t* distance) {
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int line = 0; line < 4 * W; ++line) __builtin_prefetch(keys + i * W + line * 16 + kAheadWords, 0, 3);
    step_by_nibbles<W>(keys + i * W, sums, add, distance + i);
  }
  if (i == n) return;
  std::uint32_t last[kStep * W] = {};
  std::uint16_t its[kStep] = {};
  std::copy(keys + i * W, keys + n * W, last);
  std::copy(distance + i, distance + n, its);
  step_by_nibbles<W>(last, sums, add, its);
  std::copy(its, its + (n - i), distance + i);
}
#endif

void distances(const std::uint32_t* keys, std::int64_t n, int words, const std::uint32_t* queries, int count,
               bool add, std::uint16_t* distance) noexcept {
#ifndef __AVX512VPOPCNTDQ__
  if (NibbleSums sums; nibble_sums_of(queries, count, words, sums)) {
    if (words == 1) return distances_by_nibbles<1>(keys, n, sums, add, distance);
    if (words == 2) return distances_by_nibbles<2>(keys, n, sums, add, distance);
    return distances_by_nibbles<4>(keys, n, sums, add, distance);
  }
#endif
  for_digits(queries, words, count, add,
             [&]<int W>(const Digit* digits, int used, int constant, bool add_to) {
               distances_of<W>(keys, n, digits, used, constant, add_to, distance);
             });
}

LODE_INLINE __mmask32 first_numbers(std::int64_t n) {
  return n >= kNumbers ? ~__mmask32{0} : (__mmask32{1} << n) - 1u;
}

std::uint16_t least(const std::uint16_t* x, std::int64_t n) noexcept {
  __m512i low = _mm512_set1_epi16(-1);
  for (std::int64_t i = 0; i < n; i += kNumbers) {
    const __mmask32 some = first_numbers(n - i);
    low = _mm512_mask_min_epu16(low, some, low, _mm512_maskz_loadu_epi16(some, x + i));
  }
  alignas(64) std::uint16_t lanes[kNumbers];
  _mm512_store_si512(lanes, low);
  return *std::min_element(lanes, lanes + kNumbers);
}

/// A bit for each of up to 32 numbers that is <= limit.
LODE_INLINE __mmask32 up_to(const std::uint16_t* x, std::int64_t n, __m512i limit) {
  const __mmask32 some = first_numbers(n);
  return _mm512_mask_cmple_epu16_mask(some, _mm512_maskz_loadu_epi16(some, x), limit);
}

std::int64_t count_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit) noexcept {
  const __m512i limits = _mm512_set1_epi16(static_cast<short>(limit));
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; i += kNumbers) count += std::popcount(up_to(x + i, n - i, limits));
  return count;
}

/// Writes the lanes of `rows` that `some` names, and anything behind them up to 16.
LODE_INLINE Position* keep(std::uint32_t some, __m512i rows, Position* to) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(some), rows));
  return to + std::popcount(some & 0xffffu);
}

/// No branch depends on what is found: which numbers are near cannot be foreseen.
std::int64_t collect_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit, Position offset,
                           Position* rows) noexcept {
  const __m512i limits = _mm512_set1_epi16(static_cast<short>(limit));
  const __m512i half = _mm512_set1_epi32(kNumbers / 2), whole = _mm512_set1_epi32(kNumbers);
  __m512i at = _mm512_add_epi32(_mm512_set1_epi32(offset),
                                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  Position* to = rows;
  std::int64_t i = 0;
  for (; i + kNumbers <= n; i += kNumbers) {
    const std::uint32_t some = _mm512_cmple_epu16_mask(load_words(x + i), limits);
    to = keep(some, at, to);
    to = keep(some >> 16, _mm512_add_epi32(at, half), to);
    at = _mm512_add_epi32(at, whole);
  }
  return rows_of<1>(up_to(x + i, n - i, limits), offset + static_cast<Position>(i), to) - rows;
}

}  // namespace
}  // namespace lode
