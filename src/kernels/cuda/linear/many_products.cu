// SPDX-License-Identifier: Apache-2.0
// Work map: a block computes one tile of one product (or of one part of it) with 256 threads, 16 of k at a
// time; the next 16 come from memory while these are multiplied. Wide products take tiles of 128 x 128, eight
// by eight outputs a thread; narrow ones 128 x 32 or 64 x 64.
#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/many_products.h"

namespace lode::cuda {

namespace {

constexpr int kDepth = 16, kThreads = 256, kPad = 4;

/// What a thread brings of a tile: kRows rows of an operand [rows, k] from `first` on, kDepth of k at a time; 0
/// outside of it.
template <int kRows, bool kTransposed>
struct TileOperand {
  static constexpr int kHeld = kRows * kDepth / kThreads;
  static constexpr int kApart = kTransposed ? kThreads / kRows : kThreads / kDepth;  // columns, or rows
  const float* from;                                                                 // its first number
  int stride, row, col, rows_left;
  float held[kHeld];

  __device__ __forceinline__ TileOperand(const float* matrix, std::int64_t matrix_stride, int first, int rows,
                                         int k_begin)
      : stride(static_cast<int>(matrix_stride)) {
    const int tid = static_cast<int>(threadIdx.x);
    row = kTransposed ? tid % kRows : tid / kDepth;
    col = kTransposed ? tid / kRows : tid % kDepth;
    rows_left = rows - first - row;
    const std::int64_t r = first + row, c = k_begin + col;
    from = matrix + (kTransposed ? c * matrix_stride + r : r * matrix_stride + c);
  }
  __device__ __forceinline__ void fetch(int k_left) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const bool inside =
          kTransposed ? rows_left > 0 && col + j * kApart < k_left : j * kApart < rows_left && col < k_left;
      held[j] = inside ? from[j * kApart * stride] : 0.0f;
    }
    from += kTransposed ? std::int64_t{kDepth} * stride : kDepth;
  }
  __device__ __forceinline__ void put(float (&to)[kDepth][kRows + kPad]) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (kTransposed)
        to[col + j * kApart][row] = held[j];
      else
        to[col][row + j * kApart] = held[j];
    }
  }
};

/// A thread's kCount numbers of a row of a tile, in fours that lie kStride apart.
template <int kCount, int kStride>
__device__ __forceinline__ void take(const float* row, int at, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(row + i * kStride + 4 * at);
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
}

template <class T>
__device__ __forceinline__ T* matrix(const ManyMatrices<T>& all, std::int64_t outer, std::int64_t inner) {
  return all.data + outer * all.outer + inner * all.inner;
}

/// Tiles of kM x kN outputs, kOwnM x kOwnN of them a thread's. kA, kB: how op(a) [m, k] and the transpose
/// [n, k] of op(b) are stored.
template <int kM, int kN, int kOwnM, int kOwnN, bool kA, bool kB>
__global__ __launch_bounds__(kThreads, 2) void many_products_kernel(const ManyProducts p) {
  static_assert(kM / kOwnM * (kN / kOwnN) == kThreads);
  const std::int64_t outer = blockIdx.z / p.inner, inner = blockIdx.z % p.inner;
  const int count = p.counts != nullptr ? p.counts[outer] : 0x7fffffff;
  const auto length = [&](std::int64_t all, CountedDimension which) {
    const int own = static_cast<int>(all);
    return p.counted == which ? min(own, count) : own;
  };
  const int m = length(p.m, CountedDimension::m), n = length(p.n, CountedDimension::n),
            k = length(p.k, CountedDimension::k);
  const int tiles_n = static_cast<int>((p.n + kN - 1) / kN);
  const int row0 = static_cast<int>(blockIdx.x) / tiles_n * kM,
            col0 = static_cast<int>(blockIdx.x) % tiles_n * kN;
  if (row0 >= m || col0 >= n) return;
  const int part = static_cast<int>(blockIdx.y);
  const int k_begin = part * static_cast<int>(kPartLength),
            k_end = p.part == 0 ? k : min(k, k_begin + static_cast<int>(kPartLength));

  __shared__ __align__(16) float as[2][kDepth][kM + kPad], bs[2][kDepth][kN + kPad];
  TileOperand<kM, kA> a(matrix(p.a, outer, inner), p.a.row, row0, m, k_begin);
  TileOperand<kN, kB> b(matrix(p.b, outer, inner), p.b.row, col0, n, k_begin);
  constexpr int kAcross = kN / kOwnN;
  const int tx = static_cast<int>(threadIdx.x) % kAcross, ty = static_cast<int>(threadIdx.x) / kAcross;
  constexpr int kStrideM = 4 * (kM / kOwnM), kStrideN = 4 * (kN / kOwnN);
  float sums[kOwnM][kOwnN] = {};
  a.fetch(k_end - k_begin), b.fetch(k_end - k_begin);
  a.put(as[0]), b.put(bs[0]);
  __syncthreads();
  int turn = 0;
  for (int k0 = k_begin; k0 < k_end; k0 += kDepth, turn ^= 1) {
    const int left = k_end - k0 - kDepth;
    if (left > 0) a.fetch(left), b.fetch(left);
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      float x[kOwnM], y[kOwnN];
      take<kOwnM, kStrideM>(as[turn][j], ty, x);
      take<kOwnN, kStrideN>(bs[turn][j], tx, y);
#pragma unroll
      for (int r = 0; r < kOwnM; ++r) {
#pragma unroll
        for (int c = 0; c < kOwnN; ++c) sums[r][c] = fmaf(x[r], y[c], sums[r][c]);
      }
    }
    if (left > 0) a.put(as[turn ^ 1]), b.put(bs[turn ^ 1]);
    __syncthreads();
  }
  float* const to = matrix(p.c, outer, inner) + part * p.part;
#pragma unroll
  for (int r = 0; r < kOwnM; ++r) {
    const int row = row0 + r / 4 * kStrideM + 4 * ty + r % 4;
#pragma unroll
    for (int c = 0; c < kOwnN; ++c) {
      const int col = col0 + c / 4 * kStrideN + 4 * tx + c % 4;
      if (row < m && col < n) to[row * p.c.row + col] = sums[r][c];
    }
  }
}

template <int kM, int kN, int kOwnM, int kOwnN>
void launch_tiles(const ManyProducts& p, StreamHandle stream) {
  const std::int64_t tiles = ((p.m + kM - 1) / kM) * ((p.n + kN - 1) / kN);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(p.part == 0 ? 1 : parts_of(p.k)),
                  static_cast<unsigned>(p.outer * p.inner));
  const Launch launch(grid, kThreads, 0, stream);
  if (p.a_transposed && p.b_transposed)
    launch(many_products_kernel<kM, kN, kOwnM, kOwnN, true, false>, p);
  else if (p.a_transposed)
    launch(many_products_kernel<kM, kN, kOwnM, kOwnN, true, true>, p);
  else if (p.b_transposed)
    launch(many_products_kernel<kM, kN, kOwnM, kOwnN, false, false>, p);
  else
    launch(many_products_kernel<kM, kN, kOwnM, kOwnN, false, true>, p);
}

}  // namespace

void multiply_many(const ManyProducts& p, StreamHandle stream) {
  if (p.m == 0 || p.n == 0 || p.outer == 0 || p.inner == 0) return;
  if (p.m > 64 && p.n <= 32) return launch_tiles<128, 32, 4, 4>(p, stream);
  if (p.m > 64 && p.n > 64) return launch_tiles<128, 128, 8, 8>(p, stream);
  launch_tiles<64, 64, 4, 4>(p, stream);
}

}  // namespace lode::cuda
