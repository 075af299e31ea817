// SPDX-License-Identifier: Apache-2.0
// Coded products for AVX2.
#include "kernels/cpu/select/int8_dot-inl.h"

namespace lode {

extern const Int8DotKernels kAvx2Int8Dot;
constinit const Int8DotKernels kAvx2Int8Dot = {"avx2", score_coded};

}  // namespace lode
