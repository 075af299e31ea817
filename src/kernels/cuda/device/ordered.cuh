// SPDX-License-Identifier: Apache-2.0
// Numbers as whole numbers of the same order, as kernels/score_order.h has them.
#pragma once

namespace lode::cuda {

/// Rises with x; -0 as 0; NaN gives 0.
__device__ __forceinline__ unsigned ordered(float x) {
  if (x != x) return 0;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace lode::cuda
