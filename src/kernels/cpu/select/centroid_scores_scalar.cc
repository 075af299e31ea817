// SPDX-License-Identifier: Apache-2.0
// Scores of nodes for plain C++.
#include "kernels/cpu/simd/vec_scalar.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/select/centroid_scores-inl.h"

namespace lode {
extern const CentroidScoreKernels kScalarCentroidScores;
constinit const CentroidScoreKernels kScalarCentroidScores = {.name = "scalar", .score = score};
}  // namespace lode
