// SPDX-License-Identifier: Apache-2.0
// The second pass of a choice for a block of queries where the first has stored its exponentials
// (cluster_products.cuh): a node's weight is the mean over queries of share x exponential, or the root of the
// mean of squares. A block takes a tile of nodes, its warps every eighth group of 16 rows, and reads each
// number once, in the order in which it lies. Sums are made in a fixed order.
#pragma once

#include "kernels/cuda/squeezed/cluster_products.cuh"

namespace lode::cuda {

inline constexpr int kColumnWarps = 8;

/// Sums over rows of what one lane sees of a tile: columns 8 n + 2 (lane % 4) and the next.
template <bool kSquares>
class ColumnSums {
 public:
  /// `raw` [3] of rows lane / 4 + 8 half of 16.
  __device__ __forceinline__ void add(const uint4* raw, float share) {
    if (!(share > 0.0f)) return;  // what it stored may be no numbers
    unsigned words[kStoredWords];
#pragma unroll
    for (int i = 0; i < kStoredPieces / 2; ++i)
      words[4 * i] = raw[i].x, words[4 * i + 1] = raw[i].y, words[4 * i + 2] = raw[i].z,
                words[4 * i + 3] = raw[i].w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 numbers[4];
      unpack_stored(words + 3 * i, numbers);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        add_one(sums_[2 * (4 * i + j)], numbers[j].x, share);
        add_one(sums_[2 * (4 * i + j) + 1], numbers[j].y, share);
      }
    }
  }
  /// Over the lanes that see the same columns, to [128].
  __device__ __forceinline__ void write(float* to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) {
      float sum = sums_[i];
      for (int o = 4; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane < 4) to[i / 2 * 8 + lane * 2 + i % 2] = sum;
    }
  }

 private:
  static __device__ __forceinline__ void add_one(float& sum, float stored, float share) {
    if constexpr (kSquares) {
      const float weight = stored * share;
      sum = fmaf(weight, weight, sum);
    } else {
      sum = fmaf(stored, share, sum);
    }
  }
  float sums_[kTileRows / 4] = {};
};

/// Bases only rise; before a row had one, all that it stored was 0.
__device__ __forceinline__ float share_of(float base, float2 factor) {
  return exp2f(fminf(base - factor.x, 0.0f) + factor.y);
}

/// grid: tiles of nodes, heads from first_head on.
template <bool kSquares>
__global__ __launch_bounds__(kColumnWarps * 32) void columns_kernel(const BlockParams p) {
  __shared__ float of_warps[kColumnWarps][kTileRows];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            tile = static_cast<int>(blockIdx.x), head = p.first_head + static_cast<int>(blockIdx.y);
  if (tile * kTileRows >= p.nodes(head)) return;
  ColumnSums<kSquares> sums;
  const float2* const factors = p.factors + head * p.all_rows + lane / 4;
  for (int group = warp; group * 16 < p.rows; group += kColumnWarps) {
    uint4* const from = p.stored + p.stored_at(static_cast<int>(blockIdx.y), group, tile);
    uint4 raw[kStoredPieces];
#pragma unroll
    for (int i = 0; i < kStoredPieces; ++i) raw[i] = __ldcs(from + lane + i * 32);
    const float* const bases = bases_of(from) + lane / 4;
    sums.add(raw, share_of(bases[0], factors[group * 16]));
    sums.add(raw + kStoredPieces / 2, share_of(bases[8], factors[group * 16 + 8]));
  }
  sums.write(of_warps[warp]);
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x), node = tile * kTileRows + column;
  if (column >= kTileRows) return;
  float sum = 0.0f;
  for (int w = 0; w < kColumnWarps; ++w) sum += of_warps[w][column];
  const int keys = node < p.nodes(head) ? p.first(head)[node + 1] - p.first(head)[node] : 0;
  p.weights[head * p.all_nodes + node] =
      (kSquares ? sqrtf(sum) : sum) / static_cast<float>(max(1, keys));  // weights are a key's
}

}  // namespace lode::cuda
