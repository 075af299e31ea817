// SPDX-License-Identifier: Apache-2.0
// The packed sums for AVX-512: a table of 16 numbers is one register, and a permutation looks 16 codes up.
#include "kernels/cpu/simd/avx512.h"
#include "kernels/select/packed_sum.h"

namespace lode {
namespace {

constexpr int kLanes = 16, kNibbles = 8;

void sum_nibbles(const float* tables, int queries, int parts, const std::uint32_t* codes, std::int64_t blocks,
                 float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += std::int64_t{parts} * kLanes) {
    for (int q = 0; q < queries; ++q) {
      const float* const own = tables + std::int64_t{q} * parts * 16;
      __m512 sum[kNibbles];
      for (__m512& s : sum) s = _mm512_setzero_ps();
      for (int part = 0; part < parts; ++part) {
        const __m512 table = _mm512_loadu_ps(own + part * 16);
        const __m512i word = _mm512_loadu_si512(codes + part * kLanes);
        for (int n = 0; n < kNibbles; ++n) {  // the permutation reads the lowest 4 bits of each code alone
          const __m512i code = _mm512_srl_epi32(word, _mm_cvtsi32_si128(4 * n));
          sum[n] = _mm512_add_ps(sum[n], _mm512_permutexvar_ps(code, table));
        }
      }
      float* const sums = scores + q * stride + block * kPackedBlock;
      for (int n = 0; n < kNibbles; ++n) _mm512_storeu_ps(sums + n * kLanes, sum[n]);
    }
  }
}

void sum_bytes(const float* tables, int queries, int parts, const std::uint8_t* codes, std::int64_t blocks,
               float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += parts * kPackedBlock) {
    for (int q = 0; q < queries; ++q) {
      float* const sums = scores + q * stride + block * kPackedBlock;
      for (int i = 0; i < kPackedBlock; i += kLanes) {
        __m512 sum = _mm512_setzero_ps();
        for (int part = 0; part < parts; ++part) {
          const __m512i code = _mm512_cvtepu8_epi32(
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + part * kPackedBlock + i)));
          sum = _mm512_add_ps(
              sum, _mm512_i32gather_ps(code, tables + (std::int64_t{q} * parts + part) * 256, sizeof(float)));
        }
        _mm512_storeu_ps(sums + i, sum);
      }
    }
  }
}

}  // namespace

extern const PackedSumKernels kAvx512PackedSums;
constinit const PackedSumKernels kAvx512PackedSums = {"avx512", sum_nibbles, sum_bytes};

}  // namespace lode
