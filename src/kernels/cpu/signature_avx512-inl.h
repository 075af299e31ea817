// SPDX-License-Identifier: Apache-2.0
// The signature kernels for AVX-512 F, BW, DQ, VL. With VPOPCNTDQ bits are counted by 32-bit words; without
// it by table look-ups of nibbles, as in signature_avx2.cc. Either way once for each digit of a group's sum,
// not once for each query.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cpu/simd/vec_avx512.h"
//
#include "kernels/cpu/signature-inl.h"

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

void distances(const std::uint32_t* keys, std::int64_t n, int words, const std::uint32_t* queries, int count,
               bool add, std::uint16_t* distance) noexcept {
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

std::int64_t collect_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit, Position offset,
                           Position* rows) noexcept {
  const __m512i limits = _mm512_set1_epi16(static_cast<short>(limit));
  Position* to = rows;
  for (std::int64_t i = 0; i < n; i += kNumbers)
    to = rows_of<1>(up_to(x + i, n - i, limits), offset + static_cast<Position>(i), to);
  return to - rows;
}

}  // namespace
}  // namespace lode
