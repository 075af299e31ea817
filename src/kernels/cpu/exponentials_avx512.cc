// SPDX-License-Identifier: Apache-2.0
// The softmax over a row of scores for AVX-512 F, BW, DQ, VL.
#include "kernels/cpu/simd/vec_avx512.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/exponentials-inl.h"

namespace lode {
extern const ExponentialKernels kAvx512Exponentials;
constinit const ExponentialKernels kAvx512Exponentials = {.name = "avx512", .weigh = weigh};
}  // namespace lode
