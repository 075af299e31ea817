// SPDX-License-Identifier: Apache-2.0
// Scores of nodes for AVX2, FMA.
#include "kernels/cpu/simd/vec_avx2.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/select/centroid_scores-inl.h"

namespace lode {
extern const CentroidScoreKernels kAvx2CentroidScores;
constinit const CentroidScoreKernels kAvx2CentroidScores = {.name = "avx2", .score = score};
}  // namespace lode
