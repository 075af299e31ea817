// SPDX-License-Identifier: Apache-2.0
// The search for large scores for AVX-512 F: places are pressed together without a branch.
#include <immintrin.h>

#include "kernels/select/filter_above.h"

namespace lode {
namespace {

std::int64_t collect(const float* scores, std::int64_t n, float least, std::int32_t* places) noexcept {
  constexpr int kLanes = 16;
  const __m512 low = _mm512_set1_ps(least);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __mmask16 reached = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores + i), low, _CMP_NLT_UQ);
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(reached, at));
    count += __builtin_popcount(reached);
  }
  for (; i < n; ++i)
    if (!(scores[i] < least)) places[count++] = static_cast<std::int32_t>(i);
  return count;
}

}  // namespace

extern const FilterAboveKernels kAvx512FilterAbove;
constinit const FilterAboveKernels kAvx512FilterAbove = {.name = "avx512", .collect = collect};

}  // namespace lode
