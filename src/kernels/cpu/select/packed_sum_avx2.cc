// SPDX-License-Identifier: Apache-2.0
// The packed sums for AVX2: a table of 16 numbers is two registers, and the code's highest bit says which.
#include <immintrin.h>

#include "kernels/select/packed_sum.h"

namespace lode {
namespace {

constexpr int kLanes = 8, kWords = 16, kNibbles = 8;

/// Sums of the keys of words [first, first + 8) of one block.
void half_block(const float* table, int parts, const std::uint32_t* codes, float* sums) {
  __m256 sum[kNibbles];
  for (__m256& s : sum) s = _mm256_setzero_ps();
  for (int part = 0; part < parts; ++part, table += 16, codes += kWords) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + kLanes);
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    for (int n = 0; n < kNibbles; ++n) {
      const __m256i code = _mm256_srl_epi32(word, _mm_cvtsi32_si128(4 * n));
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3 becomes the sign
      sum[n] = _mm256_add_ps(sum[n], _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                                      _mm256_permutevar8x32_ps(high, code), upper));
    }
  }
  for (int n = 0; n < kNibbles; ++n) _mm256_storeu_ps(sums + n * kWords, sum[n]);
}

void sum_nibbles(const float* tables, int queries, int parts, const std::uint32_t* codes, std::int64_t blocks,
                 float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += std::int64_t{parts} * kWords) {
    for (int q = 0; q < queries; ++q) {
      for (int first = 0; first < kWords; first += kLanes)
        half_block(tables + std::int64_t{q} * parts * 16, parts, codes + first,
                   scores + q * stride + block * kPackedBlock + first);
    }
  }
}

void sum_bytes(const float* tables, int queries, int parts, const std::uint8_t* codes, std::int64_t blocks,
               float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += parts * kPackedBlock) {
    for (int q = 0; q < queries; ++q) {
      float* const sums = scores + q * stride + block * kPackedBlock;
      for (int i = 0; i < kPackedBlock; i += kLanes) {
        __m256 sum = _mm256_setzero_ps();
        for (int part = 0; part < parts; ++part) {
          const __m256i code = _mm256_cvtepu8_epi32(
              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + part * kPackedBlock + i)));
          sum = _mm256_add_ps(
              sum, _mm256_i32gather_ps(tables + (std::int64_t{q} * parts + part) * 256, code, sizeof(float)));
        }
        _mm256_storeu_ps(sums + i, sum);
      }
    }
  }
}

}  // namespace

extern const PackedSumKernels kAvx2PackedSums;
constinit const PackedSumKernels kAvx2PackedSums = {"avx2", sum_nibbles, sum_bytes};

}  // namespace lode
