// SPDX-License-Identifier: Apache-2.0
// The gated delta rule for AVX-512.
#include "kernels/cpu/simd/vec_avx512.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/delta_rule-inl.h"

namespace lode {
extern const DeltaKernels kAvx512Delta;
constinit const DeltaKernels kAvx512Delta = {.name = "avx512", .delta_rule = delta_rule_here};
}  // namespace lode
