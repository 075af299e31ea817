// SPDX-License-Identifier: Apache-2.0
// Coded products for AVX-512 without VNNI.
#include "kernels/cpu/select/int8_dot-inl.h"

namespace lode {

extern const Int8DotKernels kAvx512Int8Dot;
constinit const Int8DotKernels kAvx512Int8Dot = {"avx512", score_coded};

}  // namespace lode
