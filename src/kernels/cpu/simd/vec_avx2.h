// SPDX-License-Identifier: Apache-2.0
// Eight floats in a register of AVX2, FMA and F16C. What each function means is said in vec_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/cpu/simd/inline.h"
#include "kernels/q4_rows.h"
#include "lodestone/types.h"

namespace lode {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 6;  // 6 x 2 accumulators, 2 columns, 1 broadcast: 15 of 16 registers
  __m256 x;
};

LODE_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LODE_INLINE Vec set1(float a) {
  return {_mm256_set1_ps(a)};
}
LODE_INLINE Vec load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
LODE_INLINE Vec load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n))};
}
LODE_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.x);
}
LODE_INLINE void store_first(float* p, Vec a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.x);
}
LODE_INLINE Vec load_strided(const float* p, std::int64_t stride, int n) {
  const auto at = [&](int i) { return p[(i < n ? i : n - 1) * stride]; };
  return {_mm256_setr_ps(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7))};
}
template <int R>
LODE_INLINE Vec load_repeated(const float* p) {
  static_assert(R == 1 || R == 2 || R == 4 || R == 8);
  if constexpr (R == 1) return set1(*p);
  if constexpr (R == 2) {
    double pair;
    std::memcpy(&pair, p, sizeof pair);
    return {_mm256_castpd_ps(_mm256_set1_pd(pair))};
  }
  if constexpr (R == 4) return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))};
  if constexpr (R == 8) return load(p);
}

template <DType T>
LODE_INLINE Vec load_as(const std::byte* p) {
  if constexpr (T == DType::f32) return {_mm256_loadu_ps(reinterpret_cast<const float*>(p))};
  if constexpr (T == DType::f16)
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  if constexpr (T == DType::bf16) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  if constexpr (T == DType::q8)
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
template <DType T>
LODE_INLINE Vec load_as_first(const std::byte* p, int n) {
  if constexpr (T == DType::f32) return load_first(reinterpret_cast<const float*>(p), n);
  alignas(32) std::byte padded[Vec::kLanes * 4] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(n) * bytes_of(T));
  return load_as<T>(padded);
}
LODE_INLINE Vec load_q4(const std::byte* row, int c, int d) {
  const std::byte* const codes = row + c / kQ4Group * (kQ4Group / 2);
  const std::byte* const scales = row + (d + kQ4Group - 1) / kQ4Group * (kQ4Group / 2);
  const __m256i words = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i nibble = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  const __m256i code = _mm256_srlv_epi32(words, _mm256_add_epi32(nibble, _mm256_set1_epi32(c % kQ4Group)));
  // Of an index the permutation takes the low three bits alone; the fourth says which half of the levels.
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kQ4Levels), code),
               high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kQ4Levels + 8), code);
  const __m256 level = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
  std::uint16_t half;
  std::memcpy(&half, scales + c / kQ4Group * 2, 2);
  return {_mm256_mul_ps(level, _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(half))))};
}
LODE_INLINE Vec load_q4_first(const std::byte* row, int c, int n, int d) {
  alignas(32) float all[Vec::kLanes];
  _mm256_store_ps(all, load_q4(row, c, d).x);
  return load_first(all, n);
}
LODE_INLINE void store_half_first(std::uint16_t* p, Vec a, int n) {
  alignas(16) std::uint16_t all[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(all), _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
  std::memcpy(p, all, static_cast<std::size_t>(n) * 2);
}
LODE_INLINE void store_bf16_first(std::uint16_t* p, Vec a, int n) {
  const __m256i u = _mm256_castps_si256(a.x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256 nan = _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
  alignas(16) std::uint16_t all[8];
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  _mm_store_si128(reinterpret_cast<__m128i*>(all), packed);
  std::memcpy(p, all, static_cast<std::size_t>(n) * 2);
}

LODE_INLINE Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.x, b.x)};
}
LODE_INLINE Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.x, b.x)};
}
LODE_INLINE Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.x, b.x)};
}
LODE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.x, b.x, c.x)};
}
LODE_INLINE Vec max_passing_nan(Vec best, Vec next) {
  return {_mm256_max_ps(next.x, best.x)};
}  // NaN: second operand
LODE_INLINE Vec sqrt_of(Vec a) {
  return {_mm256_sqrt_ps(a.x)};
}
LODE_INLINE Vec where_above(Vec limit, Vec at, Vec a, Vec other) {
  return {_mm256_blendv_ps(other.x, a.x, _mm256_cmp_ps(limit.x, at.x, _CMP_GT_OQ))};
}
LODE_INLINE bool any_above(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ)) != 0;
}
LODE_INLINE Vec pow2(Vec n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.x), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
LODE_INLINE Vec round_nearest(Vec a) {
  return {_mm256_round_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
LODE_INLINE Vec zero_below(Vec a, Vec low, Vec b) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.x, low.x, _CMP_NLT_UQ), b.x)};
}

LODE_INLINE Vec sum_lanes(Vec (&acc)[Vec::kLanes]) {
  // Two registers become one at each stage, so that all eight sums fold at once. Which input must go where
  // for lane i to end as sum i follows from the shuffles: lane 4 L + e comes from input 4 L + {0, 2, 1,
  // 3}[e].
  __m256 y[4];
  constexpr int kOrder[4] = {0, 2, 1, 3};
  for (int i = 0; i < 4; ++i) {
    const __m256 a = acc[kOrder[i]].x, b = acc[4 + kOrder[i]].x;
    y[i] = _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
  }
  __m256 z[2];
  for (int i = 0; i < 2; ++i)
    z[i] = _mm256_add_ps(_mm256_shuffle_ps(y[i], y[i + 2], 0x44), _mm256_shuffle_ps(y[i], y[i + 2], 0xee));
  return {_mm256_add_ps(_mm256_shuffle_ps(z[0], z[1], 0x88), _mm256_shuffle_ps(z[0], z[1], 0xdd))};
}

}  // namespace
}  // namespace lode
