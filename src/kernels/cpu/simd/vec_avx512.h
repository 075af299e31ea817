// SPDX-License-Identifier: Apache-2.0
// Sixteen floats in a register of AVX-512 (F, BW, DQ, VL). What each function means is said in vec_scalar.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/inline.h"
#include "kernels/q4_rows.h"
#include "lodestone/types.h"

namespace lode {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kTileRows = 12;  // 12 x 2 accumulators, 2 columns, 1 broadcast: 27 of 32 registers
  __m512 x;
};

LODE_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}
LODE_INLINE Vec set1(float a) {
  return {_mm512_set1_ps(a)};
}
LODE_INLINE Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
LODE_INLINE Vec load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
LODE_INLINE void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.x);
}
LODE_INLINE void store_first(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.x);
}
LODE_INLINE Vec load_strided(const float* p, std::int64_t stride, int n) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i row = _mm512_min_epi32(lanes, _mm512_set1_epi32(n - 1));
  // 32-bit offsets: callers gather within one tile of rows.
  return {_mm512_i32gather_ps(_mm512_mullo_epi32(row, _mm512_set1_epi32(static_cast<int>(stride))), p, 4)};
}
template <int R>
LODE_INLINE Vec load_repeated(const float* p) {
  static_assert(R == 4 || R == 8 || R == 16);
  if constexpr (R == 4) return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))};
  if constexpr (R == 8) return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))};
  if constexpr (R == 16) return load(p);
}

template <DType T>
LODE_INLINE Vec load_as(const std::byte* p) {
  if constexpr (T == DType::f32) return {_mm512_loadu_ps(p)};
  if constexpr (T == DType::f16)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  if constexpr (T == DType::bf16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  if constexpr (T == DType::q8)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
template <DType T>
LODE_INLINE Vec load_as_first(const std::byte* p, int n) {
  const __mmask16 mask = first_lanes(n);
  if constexpr (T == DType::f32) return {_mm512_maskz_loadu_ps(mask, p)};
  if constexpr (T == DType::f16) return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p))};
  if constexpr (T == DType::bf16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  if constexpr (T == DType::q8)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p)))};
}
LODE_INLINE Vec load_q4(const std::byte* row, int c, int d) {
  const std::byte* const codes = row + c / kQ4Group * (kQ4Group / 2);
  const std::byte* const scales = row + (d + kQ4Group - 1) / kQ4Group * (kQ4Group / 2);
  const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i nibble = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  const __m512i shift = _mm512_add_epi32(nibble, _mm512_set1_epi32(c % kQ4Group));
  std::uint16_t half;
  __builtin_memcpy(&half, scales + c / kQ4Group * 2, 2);
  const __m512 scale = _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half)));
  // Of an index the permutation takes the low four bits alone.
  return {_mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(words, shift), _mm512_loadu_ps(kQ4Levels)),
                        scale)};
}
LODE_INLINE Vec load_q4_first(const std::byte* row, int c, int n, int d) {
  return {_mm512_maskz_mov_ps(first_lanes(n), load_q4(row, c, d).x)};
}
LODE_INLINE void store_half_first(std::uint16_t* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n),
                           _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LODE_INLINE __m256i round_to_bf16(__m512 a) {
  const __m512i u = _mm512_castps_si512(a);
  const __m512i high = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}
LODE_INLINE void store_bf16_first(std::uint16_t* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), round_to_bf16(a.x));
}

LODE_INLINE Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.x, b.x)};
}
LODE_INLINE Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.x, b.x)};
}
LODE_INLINE Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.x, b.x)};
}
LODE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.x, b.x, c.x)};
}
LODE_INLINE Vec max_passing_nan(Vec best, Vec next) {
  return {_mm512_max_ps(next.x, best.x)};
}  // NaN: second operand
LODE_INLINE Vec sqrt_of(Vec a) {
  return {_mm512_sqrt_ps(a.x)};
}
LODE_INLINE Vec where_above(Vec limit, Vec at, Vec a, Vec other) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(limit.x, at.x, _CMP_GT_OQ), other.x, a.x)};
}
LODE_INLINE bool any_above(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ) != 0;
}
LODE_INLINE Vec pow2(Vec n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.x), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
LODE_INLINE Vec round_nearest(Vec a) {
  return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
LODE_INLINE Vec zero_below(Vec a, Vec low, Vec b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.x, low.x, _CMP_NLT_UQ), b.x)};
}

LODE_INLINE Vec sum_lanes(Vec (&acc)[Vec::kLanes]) {
  // Two registers become one at each stage, so that all sixteen sums fold at once. Which input must go where
  // for lane i to end as sum i follows from the shuffles: lane 4 L + e comes from input {0, 8, 4, 12}[L] +
  // {0, 2, 1, 3}[e], which is its own inverse.
  constexpr int kOrder[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
  __m512 y[8], z[4], w[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = acc[kOrder[i]].x, b = acc[kOrder[i + 8]].x;
    y[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
  for (int i = 0; i < 4; ++i)
    z[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    w[i] = _mm512_add_ps(_mm512_shuffle_ps(z[i], z[i + 2], 0x44), _mm512_shuffle_ps(z[i], z[i + 2], 0xee));
  return {_mm512_add_ps(_mm512_shuffle_ps(w[0], w[1], 0x88), _mm512_shuffle_ps(w[0], w[1], 0xdd))};
}

}  // namespace
}  // namespace lode
