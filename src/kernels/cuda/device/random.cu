// SPDX-License-Identifier: Apache-2.0
// Work map of fill_kernel: thread i makes elements i, i + threads, ...; element i is a hash of (seed, i). Of
// draw_kernel: grid (kDrawBlocks, KV heads x query tokens), whose blocks take the keys in turns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/rng.h"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/random.h"

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

constexpr int kDrawThreads = 256, kDrawBlocks = 32;

__global__ void __launch_bounds__(kDrawThreads)
    draw_kernel(const __grid_constant__ Queries in, std::uint64_t seed, std::int64_t sink,
                std::int64_t window, std::int64_t max_tokens, float* numbers) {
  const std::int64_t list = blockIdx.y, position = in.tokens[list / in.layout.kv_heads].position;
  const std::uint64_t own = hash_seed(seed, list % in.layout.kv_heads, position);
  wait_for_predecessor();
  release_successor();
  for (std::int64_t key = blockIdx.x * kDrawThreads + threadIdx.x; key < position + 1 - window;
       key += kDrawBlocks * kDrawThreads)
    numbers[list * max_tokens + key] =
        key < sink ? -INFINITY : nth_uniform(own, static_cast<std::uint64_t>(key - sink));
}

}  // namespace

void draw_numbers(const Queries& queries, std::uint64_t seed, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* numbers, StreamHandle stream) {
  if (queries.count == 0) return;
  const auto lists = static_cast<unsigned>(queries.count * queries.layout.kv_heads);
  EarlyLaunch({kDrawBlocks, lists}, kDrawThreads, 0, 1, stream)(draw_kernel, queries, seed, sink, window,
                                                                max_tokens, numbers);
}

void fill_uniform(void* out, DType type, std::int64_t n, float centre, float width, std::uint64_t seed,
                  StreamHandle stream) {
  if (n == 0) return;
  constexpr int kThreads = 256, kBlocks = 2048;
  if (type == DType::f32)
    Launch(kBlocks, kThreads, 0, stream)(fill_kernel<float>, static_cast<float*>(out), n, centre, width,
                                         seed);
  else if (type == DType::f16)
    Launch(kBlocks, kThreads, 0, stream)(fill_kernel<__half>, static_cast<__half*>(out), n, centre, width,
                                         seed);
  else
    Launch(kBlocks, kThreads, 0, stream)(fill_kernel<__nv_bfloat16>, static_cast<__nv_bfloat16*>(out), n,
                                         centre, width, seed);
}

}  // namespace lode::cuda
