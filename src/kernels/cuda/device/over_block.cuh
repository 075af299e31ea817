// SPDX-License-Identifier: Apache-2.0
// What the threads of a block have, combined in a fixed order: the bits are the same every time.
#pragma once

namespace lode::cuda {

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

/// Over a block of kWarps warps; every thread gets it.
template <int kWarps, class T, class Combine>
__device__ __forceinline__ T over_block(T mine, Combine combine) {
  __shared__ T part[kWarps];
  for (int o = 16; o > 0; o /= 2) mine = combine(mine, __shfl_xor_sync(~0u, mine, o));
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = mine;
  __syncthreads();
  T all = part[0];
  for (int w = 1; w < kWarps; ++w) all = combine(all, part[w]);
  return all;
}

}  // namespace lode::cuda
