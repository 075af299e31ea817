// SPDX-License-Identifier: Apache-2.0
// The gated delta rule for AVX2, FMA.
#include "kernels/cpu/simd/vec_avx2.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/delta_rule-inl.h"

namespace lode {
extern const DeltaKernels kAvx2Delta;
constinit const DeltaKernels kAvx2Delta = {.name = "avx2", .delta_rule = delta_rule_here};
}  // namespace lode
