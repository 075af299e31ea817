// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/read.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 512, kInFlight = 8;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* from, std::int64_t n, uint4* sink) {
  uint4 x = {};
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kInFlight - 1) * step < n; i += kInFlight * step) {
    uint4 some[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) some[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      x.x ^= some[j].x, x.y ^= some[j].y, x.z ^= some[j].z, x.w ^= some[j].w;
  }
  for (; i < n; i += step) {
    const uint4 one = __ldcs(from + i);
    x.x ^= one.x, x.y ^= one.y, x.z ^= one.z, x.w ^= one.w;
  }
  if ((x.x ^ x.y ^ x.z ^ x.w) == 0x12345678u) *sink = x;  // or nothing would be read
}

}  // namespace

void read_only(const void* from, std::int64_t bytes, int blocks, void* sink, StreamHandle stream) {
  if (bytes < 16) return;
  Launch(static_cast<unsigned>(blocks), kThreads, 0, stream)(read_kernel, static_cast<const uint4*>(from),
                                                             bytes / 16, static_cast<uint4*>(sink));
}

}  // namespace lode::cuda
