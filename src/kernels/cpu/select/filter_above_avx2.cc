// SPDX-License-Identifier: Apache-2.0
// The search for large scores for AVX2.
#include <immintrin.h>

#include "kernels/select/filter_above.h"

namespace lode {
namespace {

std::int64_t collect(const float* scores, std::int64_t n, float least, std::int32_t* places) noexcept {
  constexpr int kLanes = 8;
  const __m256 low = _mm256_set1_ps(least);
  std::int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 reached = _mm256_cmp_ps(_mm256_loadu_ps(scores + i), low, _CMP_NLT_UQ);
    for (auto bits = static_cast<unsigned>(_mm256_movemask_ps(reached)); bits != 0; bits &= bits - 1)
      places[count++] = static_cast<std::int32_t>(i) + __builtin_ctz(bits);
  }
  for (; i < n; ++i)
    if (!(scores[i] < least)) places[count++] = static_cast<std::int32_t>(i);
  return count;
}

}  // namespace

extern const FilterAboveKernels kAvx2FilterAbove;
constinit const FilterAboveKernels kAvx2FilterAbove = {.name = "avx2", .collect = collect};

}  // namespace lode
