// SPDX-License-Identifier: Apache-2.0
// The softmax over a row of scores for AVX2, FMA.
#include "kernels/cpu/simd/vec_avx2.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/exponentials-inl.h"

namespace lode {
extern const ExponentialKernels kAvx2Exponentials;
constinit const ExponentialKernels kAvx2Exponentials = {.name = "avx2", .weigh = weigh};
}  // namespace lode
