// SPDX-License-Identifier: Apache-2.0
// The softmax over a row of scores for plain C++.
#include "kernels/cpu/simd/vec_scalar.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/exponentials-inl.h"

namespace lode {
extern const ExponentialKernels kScalarExponentials;
constinit const ExponentialKernels kScalarExponentials = {.name = "scalar", .weigh = weigh};
}  // namespace lode
