// SPDX-License-Identifier: Apache-2.0
// What kernels of bf16 products share, over vec_avx512.h.
#pragma once

#include "kernels/cpu/simd/vec_avx512.h"

namespace lode {
namespace {

LODE_INLINE __m512i bits(__m512bh a) {
  __m512i to;
  __builtin_memcpy(&to, &a, sizeof to);
  return to;
}

/// bf16 of a in the low half, of b in the high half.
LODE_INLINE __m512i join_bf16(Vec a, Vec b) {
  return bits(_mm512_cvtne2ps_pbh(b.x, a.x));
}
/// Lane i: bf16 of lane i of a in the low half, of b in the high half.
LODE_INLINE __m512i pair_bf16(Vec a, Vec b) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), join_bf16(a, b));
}

/// e^a for a <= 88 within 5e-6, far below what bf16 keeps; 0 for -inf, NaN stays NaN.
LODE_INLINE Vec weight_of(Vec a) {
  const __m512 x = _mm512_max_ps(_mm512_set1_ps(-200.0f), a.x);  // NaN: second operand
  const __m512 log2e = _mm512_set1_ps(1.44269504089f);
  const __m512 n = round_nearest({_mm512_mul_ps(x, log2e)}).x;
  const Vec r = {_mm512_fmsub_ps(x, log2e, n)};  // 2^(n + r), |r| <= 1/2
  Vec y = fma(set1(1.33335581e-3f), r, set1(9.61812911e-3f));
  y = fma(y, r, set1(5.55041087e-2f));
  y = fma(y, r, set1(2.40226507e-1f));
  y = fma(y, r, set1(6.93147181e-1f));
  y = fma(y, r, set1(1.0f));
  return {_mm512_scalef_ps(y.x, n)};
}

}  // namespace
}  // namespace lode
