// SPDX-License-Identifier: Apache-2.0
// Nearest centroids: a float32 matrix product whose outputs never leave the block. Tiles of 128 points by 128
// centroids, eight by eight a thread, with the next eight columns on their way while these are multiplied; every
// product is one chain of fused multiply-adds in the order of the columns, so its bits do not depend on the tile.
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/select/select.h"

namespace lode::cuda {

namespace {

constexpr int kTile = 128, kDepth = 8, kThreads = 256, kEach = 8, kHalf = kTile / 2;

/// Columns of both operands, one below the other.
struct Panel {
  float x[kDepth][kTile + 4], c[kDepth][kTile + 4];
};

/// Four neighbouring columns of a row; 0 outside of the matrix. `kFours`: rows begin at 16-byte bounds.
template <bool kFours>
__device__ __forceinline__ float4 load(const float* rows, std::int64_t row, std::int64_t count, int d,
                                       int column) {
  if (row >= count || column >= d) return {};
  const float* const from = rows + row * d + column;
  if constexpr (kFours) return *reinterpret_cast<const float4*>(from);
  return {from[0], column + 1 < d ? from[1] : 0.0f, column + 2 < d ? from[2] : 0.0f,
          column + 3 < d ? from[3] : 0.0f};
}

__device__ __forceinline__ void put(float (&to)[kDepth][kTile + 4], int row, int column, const float4& x) {
  to[column][row] = x.x, to[column + 1][row] = x.y, to[column + 2][row] = x.z, to[column + 3][row] = x.w;
}

__device__ __forceinline__ void load_eight(const float (&from)[kTile + 4], int at, float (&to)[kEach]) {
  const float4 a = *reinterpret_cast<const float4*>(&from[at]),
               b = *reinterpret_cast<const float4*>(&from[at + kHalf]);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

template <bool kFours>
__global__ __launch_bounds__(kThreads, 2) void assign_kernel(const float* x, std::int64_t n,
                                                             const float* centroids, std::int64_t count,
                                                             int d, std::int32_t* label, float* best) {
  __shared__ __align__(16) Panel panels[2];
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;
  const int row = static_cast<int>(threadIdx.x) / 2, column = static_cast<int>(threadIdx.x) % 2 * 4;
  const std::int64_t first = std::int64_t{blockIdx.x} * kTile;
  const int steps = (d + kDepth - 1) / kDepth;
  const std::int64_t all = (count + kTile - 1) / kTile * steps;
  float4 of_x, of_c;
  const auto bring = [&](std::int64_t step) {
    const int at = static_cast<int>(step % steps) * kDepth + column;
    of_x = load<kFours>(x, first + row, n, d, at);
    of_c = load<kFours>(centroids, step / steps * kTile + row, count, d, at);
  };
  float high[kEach];
  std::int32_t at[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) high[i] = -INFINITY, at[i] = 0x7fffffff;
  float sums[kEach][kEach] = {};
  if (all > 0) bring(0);
  for (std::int64_t step = 0; step < all; ++step) {
    Panel& panel = panels[step % 2];
    put(panel.x, row, column, of_x);
    put(panel.c, row, column, of_c);
    __syncthreads();  // the other panel's readers have passed the one before
    if (step + 1 < all) bring(step + 1);
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      float a[kEach], b[kEach];
      load_eight(panel.x[j], ty * 4, a);
      load_eight(panel.c[j], tx * 4, b);
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int c = 0; c < kEach; ++c) sums[r][c] = fmaf(a[r], b[c], sums[r][c]);
      }
    }
    if ((step + 1) % steps != 0) continue;
    const std::int64_t from = step / steps * kTile + tx * 4;
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const std::int64_t centroid = from + c % 4 + c / 4 * kHalf;
        if (centroid < count && sums[r][c] > high[r])
          high[r] = sums[r][c], at[r] = static_cast<std::int32_t>(centroid);
        sums[r][c] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    for (int o = 8; o > 0; o /= 2) {
      const float other = __shfl_xor_sync(~0u, high[r], o);
      const std::int32_t its = __shfl_xor_sync(~0u, at[r], o);
      if (other > high[r] || (other == high[r] && its < at[r])) high[r] = other, at[r] = its;
    }
    const std::int64_t point = first + ty * 4 + r % 4 + r / 4 * kHalf;
    if (tx == 0 && point < n) {
      label[point] = at[r] == 0x7fffffff ? 0 : at[r];  // a point with a NaN exceeds nothing
      if (best != nullptr) best[point] = high[r];
    }
  }
}

bool at_16_bytes(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

}  // namespace

void assign(const float* x, std::int64_t n, const float* centroids, std::int64_t c, int d,
            std::int32_t* label, float* best, StreamHandle stream) {
  if (n == 0) return;
  const auto blocks = static_cast<unsigned>((n + kTile - 1) / kTile);
  if (d % 4 == 0 && at_16_bytes(x) && at_16_bytes(centroids))
    Launch(blocks, kThreads, 0, stream)(assign_kernel<true>, x, n, centroids, c, d, label, best);
  else
    Launch(blocks, kThreads, 0, stream)(assign_kernel<false>, x, n, centroids, c, d, label, best);
}

}  // namespace lode::cuda
