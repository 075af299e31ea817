// SPDX-License-Identifier: Apache-2.0
// The parts of the bucket classifier (classifier.cu) that know nothing of buckets: how a block lays out its
// shared memory, and its share of a product of 8-bit integers.
#pragma once

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/classifier.h"

namespace lode::cuda {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunk = 64;         // columns of a piece of weights
constexpr float kMost = 32639.0f;  // 127 * 256 + 127: what two signed bytes hold

/// Parts of a block's shared memory, in bytes from its start.
struct Plan {
  int q = 0, hidden = 0, bytes8 = 0, sums = 0, own = 0, tails = 0, stats = 0, hidden_peaks = 0, keys = 0,
      own_keys = 0, found = 0, sizes = 0, offsets = 0, chosen = 0, starts = 0, map = 0, total = 0;
  int stride = 0;                        // of a column of bytes8
  int hidden_rows = 0, bucket_rows = 0;  // of one block
  int hidden_stride = 0;                 // floats of a head of `hidden`

  __host__ __device__ Plan(const NetLayout& net, int heads, int probes, int ranks) {
    const int columns = heads <= 4 ? 8 : heads <= 8 ? 16 : 32;
    const int in = NetLayout::padded_columns(net.inputs), of_hidden = NetLayout::padded_columns(net.hidden);
    const int mid = NetLayout::padded_columns(net.columns_of_output());
    hidden_rows = (NetLayout::padded_rows(net.hidden) / 16 + ranks - 1) / ranks * 16;
    bucket_rows = (NetLayout::padded_rows(net.buckets) / 16 + ranks - 1) / ranks * 16;
    const int most_rows = hidden_rows > bucket_rows ? hidden_rows : bucket_rows;
    stride = (in > mid ? in : mid) + 64;
    hidden_stride = of_hidden > ranks * hidden_rows ? of_hidden : ranks * hidden_rows;
    int at = 0;
    const auto take = [&](int bytes) {
      const int from = at;
      at += (bytes + 127) / 128 * 128;
      return from;
    };
    q = take(heads * in * 4);
    hidden = take(heads * hidden_stride * 4);
    bytes8 = take(columns * stride);
    sums = take(net.planes * most_rows * columns * 4);
    own = take(most_rows * heads * 4);
    tails = take((hidden_rows + bucket_rows) * 8);
    stats = take(ranks * heads * 8);
    hidden_peaks = take(ranks * heads * 4);
    keys = take(ranks * bucket_rows * 4);
    own_keys = take(bucket_rows * 4);
    found = take(ranks * bucket_rows * 2);
    sizes = take(bucket_rows * 4);
    offsets = take((net.buckets + 1) * 4);
    const int most = probes < net.buckets ? probes : net.buckets;
    chosen = take(most * 4);
    starts = take((most + 1) * 4);
    map = take((net.buckets + 31) / 32 * 4);
    total = at;
  }
};

__device__ __forceinline__ void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// A block's share of one layer: whole tiles of 16 rows, cut into pieces of kChunk columns that the warps
/// take in stretches.
template <int kPlanes, int kHeld /*pieces whose weights a warp has on the way at once*/>
class Share {
 public:
  const uint4* weights = nullptr;                  // of this block's first tile
  int chunks = 0, pieces = 0, begin = 0, end = 0;  // of a tile; of the block; of this warp
  uint4 held[kHeld][kPlanes][2];

  __device__ Share(const std::byte* from, int rows, int columns, int rank, int rows_of_rank) {
    chunks = columns / kChunk;
    const int first = rank * rows_of_rank / 16, last = min(rows / 16, first + rows_of_rank / 16);
    weights = reinterpret_cast<const uint4*>(from) + std::int64_t{first} * chunks * kPlanes * 64;
    pieces = max(0, last - first) * chunks;
    const int warp = static_cast<int>(threadIdx.x) / 32, each = (pieces + kWarps - 1) / kWarps;
    begin = min(pieces, warp * each);
    end = min(pieces, begin + each);
  }
  __device__ void fetch(int from) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (from + i >= end) continue;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          held[i][plane][half] =
              __ldg(weights + (std::int64_t{from + i} * kPlanes + plane) * 64 + half * 32 + lane);
      }
    }
  }
  /// Adds the products with the columns in `x` to `sums` [planes][rows][columns].
  template <int kTiles>
  __device__ void multiply_into(const signed char* x, int stride, int rows, int* sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    int c[kPlanes][kTiles][4] = {};
    int tile = begin / max(1, chunks), chunk = begin - tile * chunks;
    for (int from = begin; from < end; from += kHeld) {
      if (from > begin) fetch(from);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (from + i >= end) break;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(x + (n * 8 + g) * stride + chunk * kChunk + t * 16);
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            const uint4 low = held[i][plane][0], high = held[i][plane][1];
            multiply(c[plane][n], low.x, high.x, low.y, high.y, b.x, b.y);
            multiply(c[plane][n], low.z, high.z, low.w, high.w, b.z, b.w);
          }
        }
        if (++chunk < chunks && from + i + 1 < end) continue;
        add<kTiles>(c, tile * 16 + g, t, rows, sums);
        chunk = 0;
        ++tile;
      }
    }
  }

 private:
  /// A finished tile's sums to those of the block; clears them.
  template <int kTiles>
  __device__ static void add(int (&c)[kPlanes][kTiles][4], int row, int t, int rows, int* sums) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          atomicAdd(sums + ((plane * rows + row + e / 2 * 8) * kTiles + n) * 8 + 2 * t + e % 2,
                    c[plane][n][e]);
          c[plane][n][e] = 0;
        }
      }
    }
  }
};

}  // namespace lode::cuda
