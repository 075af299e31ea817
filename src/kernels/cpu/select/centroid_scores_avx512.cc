// SPDX-License-Identifier: Apache-2.0
// Scores of nodes for AVX-512 F, BW, DQ, VL.
#include "kernels/cpu/simd/vec_avx512.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/select/centroid_scores-inl.h"

namespace lode {
extern const CentroidScoreKernels kAvx512CentroidScores;
constinit const CentroidScoreKernels kAvx512CentroidScores = {.name = "avx512", .score = score};
}  // namespace lode
