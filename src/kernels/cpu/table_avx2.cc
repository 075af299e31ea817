// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2, FMA, F16C.
#include "kernels/cpu/simd/vec_avx2.h"
//
#include "kernels/cpu/table-inl.h"
//
#include "kernels/cpu/simd/quads_avx2.h"
//
#include "kernels/cpu/attend_q8-inl.h"

namespace lode {
extern const KernelTable kAvx2Kernels;
constinit const KernelTable kAvx2Kernels = with_q8(LODE_KERNEL_TABLE("avx2"));
}  // namespace lode
