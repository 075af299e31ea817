// SPDX-License-Identifier: Apache-2.0
// The kernels for plain C++, for any x86-64 and as the specification.
#include "kernels/cpu/simd/vec_scalar.h"
//
#include "kernels/cpu/table-inl.h"

namespace lode {
extern const KernelTable kScalarKernels;
constinit const KernelTable kScalarKernels = LODE_KERNEL_TABLE("scalar");
}  // namespace lode
