// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lode::cuda {

/// The sum of x over the lanes of a warp up to this one, and with it. By the whole warp.
template <class T>
__device__ __forceinline__ T sum_up_to(T x, int lane) {
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const T other = __shfl_up_sync(~0u, x, o);
    if (lane >= o) x += other;
  }
  return x;
}

}  // namespace lode::cuda
