// SPDX-License-Identifier: Apache-2.0
// Coded products for AVX2.
#include "kernels/cpu/select/int8_dot-inl.h"

namespace lode {

extern const CodedDotKernels kAvx2CodedDot;
constinit const CodedDotKernels kAvx2CodedDot = {"avx2", score_coded};

}  // namespace lode
