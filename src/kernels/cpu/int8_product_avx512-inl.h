// SPDX-License-Identifier: Apache-2.0
// The 8-bit products for AVX-512 F, BW, DQ, VL: as for AVX2, sixteen sums at a time. VNNI multiplies and adds
// in one instruction.
#pragma once

#include "kernels/cpu/int8_product-inl.h"
#include "kernels/cpu/simd/avx512.h"

namespace lode {
namespace {

inline __m512i add_products(__m512i sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

/// The sums of the lanes of four registers.
inline __m128i sum_lanes(const __m512i (&x)[4]) {
  const auto pairs = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i low = pairs(x[0], x[1]), high = pairs(x[2], x[3]);
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

struct Piece {
  template <int M>
  static void sums_of(const std::int16_t* x, const std::int8_t* w, std::int64_t k,
                      std::int32_t (*sums)[kInt8Rows]) {
    __m512i sum[M][kInt8Rows];
    for (auto& row : sum)
      for (__m512i& s : row) s = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < k; i += kInt8Columns, w += kInt8Rows * kInt8Columns) {
      ask_ahead(w);
      __m512i wide[kInt8Rows];
      for (int r = 0; r < kInt8Rows; ++r)
        wide[r] =
            _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + r * kInt8Columns)));
      for (int m = 0; m < M; ++m) {
        const __m512i v = _mm512_loadu_si512(x + m * k + i);
        for (int r = 0; r < kInt8Rows; ++r) sum[m][r] = add_products(sum[m][r], v, wide[r]);
      }
    }
    for (int m = 0; m < M; ++m) _mm_store_si128(reinterpret_cast<__m128i*>(sums[m]), sum_lanes(sum[m]));
  }
};

}  // namespace
}  // namespace lode
