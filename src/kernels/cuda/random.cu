// SPDX-License-Identifier: Apache-2.0
// Work map: thread i makes elements i, i + threads, ...; element i is a hash of (seed, i).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/random.h"

namespace lode::cuda {

namespace {

/// The finaliser of SplitMix64.
__device__ std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class T>
__global__ void fill_kernel(T* out, std::int64_t n, float centre, float width, std::uint64_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const auto bits = static_cast<std::int32_t>(mix(mix(seed) ^ static_cast<std::uint64_t>(i)) >> 32);
    out[i] = static_cast<T>(centre + width * (static_cast<float>(bits) + 0.5f) * 0x1p-31f);
  }
}

}  // namespace

void fill_uniform(void* out, DType type, std::int64_t n, float centre, float width, std::uint64_t seed,
                  StreamHandle stream) {
  if (n == 0) return;
  constexpr int kThreads = 256, kBlocks = 2048;
  if (type == DType::f32)
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<float*>(out), n, centre, width, seed);
  else if (type == DType::f16)
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__half*>(out), n, centre, width, seed);
  else
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(out), n, centre, width, seed);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
