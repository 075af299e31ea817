// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 x 64 outputs by 16 of k, four by four outputs a thread: for machines without cuBLASLt, and what
// its products are tested against.
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/linear_cublaslt.h"
#include "kernels/cuda/linear/product.h"

namespace lode::cuda {

namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;

/// Rows [first, first + kTile) of an operand [rows, k], k columns [k0, k0 + kDepth); zero outside of it.
template <bool kTransposed>
__device__ __forceinline__ void load(const float* from, std::int64_t first, std::int64_t rows, std::int64_t k,
                                     std::int64_t k0, float (&to)[kDepth][kTile + 4]) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int row = kTransposed ? i % kTile : i / kDepth, col = kTransposed ? i / kTile : i % kDepth;
    const std::int64_t r = first + row, c = k0 + col;
    to[col][row] = r < rows && c < k ? from[kTransposed ? c * rows + r : r * k + c] : 0.0f;
  }
}

/// kA, kB: how op(a) [m, k] and the transpose [n, k] of op(b) are stored.
template <bool kA, bool kB>
__global__ __launch_bounds__(kThreads) void product_kernel(const Product p) {
  __shared__ __align__(16) float as[kDepth][kTile + 4], bs[kDepth][kTile + 4];
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;
  const std::int64_t row0 = std::int64_t{blockIdx.y} * kTile, col0 = std::int64_t{blockIdx.x} * kTile;
  float sums[4][4] = {};
  for (std::int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    __syncthreads();
    load<kA>(p.a, row0, p.m, p.k, k0, as);
    load<kB>(p.b, col0, p.n, p.k, k0, bs);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      const float4 a = *reinterpret_cast<const float4*>(&as[j][ty * 4]);
      const float4 b = *reinterpret_cast<const float4*>(&bs[j][tx * 4]);
      const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r][c] = fmaf(x[r], y[c], sums[r][c]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const std::int64_t row = row0 + ty * 4 + r, col = col0 + tx * 4 + c;
      if (row >= p.m || col >= p.n) continue;
      float* to = p.c + row * p.n + col;
      *to = p.add ? *to + sums[r][c] : sums[r][c];
    }
  }
}

}  // namespace

void multiply_f32(const Product& p, StreamHandle stream) {
  if (p.m == 0 || p.n == 0) return;
  const dim3 grid(static_cast<unsigned>((p.n + kTile - 1) / kTile),
                  static_cast<unsigned>((p.m + kTile - 1) / kTile));
  if (p.a_transposed && p.b_transposed)
    Launch(grid, kThreads, 0, stream)(product_kernel<true, false>, p);
  else if (p.a_transposed)
    Launch(grid, kThreads, 0, stream)(product_kernel<true, true>, p);
  else if (p.b_transposed)
    Launch(grid, kThreads, 0, stream)(product_kernel<false, false>, p);
  else
    Launch(grid, kThreads, 0, stream)(product_kernel<false, true>, p);
}

Products::Products(bool exact) {
  if (exact)
    found_ = "not used (own kernels in float32)";
  else
    library_ = CublasLt::open(found_);
}
Products::~Products() = default;

void Products::multiply(const Product& product, StreamHandle stream) {
  if (library_ == nullptr || !library_->multiply(product, stream)) multiply_f32(product, stream);
}

}  // namespace lode::cuda
