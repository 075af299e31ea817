// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 F, BW, DQ, VL.
#include "kernels/cpu/simd/vec_avx512.h"
//
#include "kernels/cpu/table-inl.h"
//
#include "kernels/cpu/simd/quads_avx512.h"
//
#include "kernels/cpu/attend_q8-inl.h"

namespace lode {
extern const KernelTable kAvx512Kernels;
constinit const KernelTable kAvx512Kernels = with_q8(LODE_KERNEL_TABLE("avx512"));
}  // namespace lode
