// SPDX-License-Identifier: Apache-2.0
// The 8-bit products for AVX2: weights are widened to 16 bits, whose products add up in pairs without loss.
#include <immintrin.h>

#include "kernels/cpu/int8_product-inl.h"

namespace lode {
namespace {

constexpr int kLanes = 16;

/// Four rows, two at a time: sixteen registers hold no more sums.
struct Piece {
  template <int M>
  static void sums_of(const std::int16_t* x, const std::int8_t* w, std::int64_t k,
                      std::int32_t (*sums)[kInt8Rows]) {
    constexpr int kRows = 2;
    for (int first = 0; first < kInt8Rows; first += kRows) {
      __m256i sum[M][kRows];
      for (auto& row : sum)
        for (__m256i& s : row) s = _mm256_setzero_si256();
      for (std::int64_t i = 0; i < k; i += kLanes) {
        const std::int8_t* const piece =
            w + i / kInt8Columns * kInt8Columns * kInt8Rows + first * kInt8Columns + i % kInt8Columns;
        if (first == 0 && i % kInt8Columns == 0) ask_ahead(piece);
        __m256i wide[kRows];
        for (int r = 0; r < kRows; ++r)
          wide[r] = _mm256_cvtepi8_epi16(
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece + r * kInt8Columns)));
        for (int m = 0; m < M; ++m) {
          const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + m * k + i));
          for (int r = 0; r < kRows; ++r)
            sum[m][r] = _mm256_add_epi32(sum[m][r], _mm256_madd_epi16(v, wide[r]));
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int r = 0; r < kRows; ++r) {
          alignas(32) std::int32_t lanes[8];
          _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum[m][r]);
          sums[m][first + r] = 0;
          for (const std::int32_t lane : lanes) sums[m][first + r] += lane;
        }
      }
    }
  }
};

}  // namespace

extern const Int8ProductKernels kAvx2Int8Products;
constinit const Int8ProductKernels kAvx2Int8Products = {"avx2", encode, products_by<Piece>};

}  // namespace lode
