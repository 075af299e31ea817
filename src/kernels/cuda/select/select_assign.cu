// SPDX-License-Identifier: Apache-2.0
// Nearest centroids: a float32 matrix product whose outputs never leave the block. Tiles of 64 points by 64
// centroids, four by four a thread; every product is one chain of fused multiply-adds in the order of the
// columns, so its bits do not depend on the tile.
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/select/select.h"

namespace lode::cuda {

namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;

__device__ __forceinline__ void load(const float* rows, std::int64_t first, std::int64_t count, int d, int c0,
                                     float (&to)[kDepth][kTile + 4]) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int row = i / kDepth, c = i % kDepth;
    to[c][row] = first + row < count && c0 + c < d ? rows[(first + row) * d + c0 + c] : 0.0f;
  }
}

__global__ __launch_bounds__(kThreads) void assign_kernel(const float* x, std::int64_t n,
                                                          const float* centroids, std::int64_t count, int d,
                                                          std::int32_t* label, float* best) {
  __shared__ __align__(16) float xs[kDepth][kTile + 4], cs[kDepth][kTile + 4];
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;
  const std::int64_t first = std::int64_t{blockIdx.x} * kTile;
  float high[4];
  std::int32_t at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) high[i] = -INFINITY, at[i] = 0x7fffffff;
  for (std::int64_t c0 = 0; c0 < count; c0 += kTile) {
    float sums[4][4] = {};
    for (int k = 0; k < d; k += kDepth) {
      __syncthreads();
      load(x, first, n, d, k, xs);
      load(centroids, c0, count, d, k, cs);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kDepth; ++j) {
        const float4 a = *reinterpret_cast<const float4*>(&xs[j][ty * 4]);
        const float4 b = *reinterpret_cast<const float4*>(&cs[j][tx * 4]);
        const float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[r][c] = fmaf(as[r], bs[c], sums[r][c]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const std::int64_t centroid = c0 + tx * 4 + c;
        if (centroid < count && sums[r][c] > high[r])
          high[r] = sums[r][c], at[r] = static_cast<std::int32_t>(centroid);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    for (int o = 8; o > 0; o /= 2) {
      const float other = __shfl_xor_sync(~0u, high[r], o);
      const std::int32_t its = __shfl_xor_sync(~0u, at[r], o);
      if (other > high[r] || (other == high[r] && its < at[r])) high[r] = other, at[r] = its;
    }
    const std::int64_t point = first + ty * 4 + r;
    if (tx == 0 && point < n) {
      label[point] = at[r] == 0x7fffffff ? 0 : at[r];  // a point with a NaN exceeds nothing
      if (best != nullptr) best[point] = high[r];
    }
  }
}

}  // namespace

void assign(const float* x, std::int64_t n, const float* centroids, std::int64_t c, int d,
            std::int32_t* label, float* best, StreamHandle stream) {
  if (n == 0) return;
  assign_kernel<<<static_cast<unsigned>((n + kTile - 1) / kTile), kThreads, 0, stream>>>(x, n, centroids, c,
                                                                                         d, label, best);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
