// SPDX-License-Identifier: Apache-2.0
// Transpositions of 32-bit lanes in registers of AVX-512.
#pragma once

#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/inline.h"

namespace lode {
namespace {

/// Lane n of register j becomes what 32-bit lane j of register n was.
LODE_INLINE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 4) {  // four rows: in each quarter of y[i + j] lane j of that quarter
    const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]),
                  c = _mm512_unpackhi_epi32(x[i], x[i + 1]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
    y[i] = _mm512_unpacklo_epi64(a, b), y[i + 1] = _mm512_unpackhi_epi64(a, b);
    y[i + 2] = _mm512_unpacklo_epi64(c, d), y[i + 3] = _mm512_unpackhi_epi64(c, d);
  }
  for (int j = 0; j < 4; ++j) {  // quarters change places with rows
    const __m512i a = _mm512_shuffle_i32x4(y[j], y[j + 4], 0x44),
                  b = _mm512_shuffle_i32x4(y[j + 8], y[j + 12], 0x44),
                  c = _mm512_shuffle_i32x4(y[j], y[j + 4], 0xee),
                  d = _mm512_shuffle_i32x4(y[j + 8], y[j + 12], 0xee);
    x[j] = _mm512_shuffle_i32x4(a, b, 0x88), x[j + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
    x[j + 8] = _mm512_shuffle_i32x4(c, d, 0x88), x[j + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
/// The same where rows n and n + 4, for n of 0 to 3 and 8 to 11, are the halves of a register.
LODE_INLINE void transpose(__m512i (&x)[8]) {
  __m512i y[8];
  for (int i = 0; i < 8; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]),
                  c = _mm512_unpackhi_epi32(x[i], x[i + 1]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
    y[i] = _mm512_unpacklo_epi64(a, b), y[i + 1] = _mm512_unpackhi_epi64(a, b);
    y[i + 2] = _mm512_unpacklo_epi64(c, d), y[i + 3] = _mm512_unpackhi_epi64(c, d);
  }
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 4], 0x88);
    x[j + 4] = _mm512_shuffle_i32x4(y[j], y[j + 4], 0xdd);
  }
}

}  // namespace
}  // namespace lode
