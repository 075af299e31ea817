// SPDX-License-Identifier: Apache-2.0
// The gated delta rule for plain C++.
#include "kernels/cpu/simd/vec_scalar.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/delta_rule-inl.h"

namespace lode {
extern const DeltaKernels kScalarDelta;
constinit const DeltaKernels kScalarDelta = {.name = "scalar", .delta_rule = delta_rule_here};
}  // namespace lode
