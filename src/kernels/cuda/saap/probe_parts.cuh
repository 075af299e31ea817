// SPDX-License-Identifier: Apache-2.0
// The parts of the bucket classifier (probe.cu) that know nothing of queries: what a task looks like to
// a block, as the host works it out once for all of them, and tiles of weights times columns of bytes.
#pragma once

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/saap/probe.h"

namespace lode::cuda {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = 16, kChunk = 64;  // rows and columns of a piece of weights
constexpr float kMost = 32639.0f;       // 127 * 256 + 127: what two signed bytes hold
constexpr int kMostChunks = 7;          // whose sums fit in 32 bits: 7 * 64 * 128 * kMost

/// How the network is shared out over the blocks of a cluster: hidden units, as rows of W1 and columns of W2,
/// in whole chunks; buckets, as rows of W3 (or of the only matrix) and of the scores, in whole tiles.
struct Cut {
  int hidden_rows = 0, bucket_rows = 0;    // of one block
  int hidden_tiles = 0, bucket_tiles = 0;  // in all
  int hidden_chunks = 0;                   // in all
  int senders = 0;                         // blocks that have hidden units
  int input_chunks = 0;                    // of x
  int stride_1 = 0, stride_2 = 0;          // pieces of a tile of W1, of [W2, W3]
  int direct_chunk = 0;                    // where columns for x begin in the latter
  std::int64_t net_bytes = 0, output = 0;  // from a head's network to the next one's; where W2 begins
  std::int64_t tails_1 = 0, tails_2 = 0;   // scales and biases
  std::int64_t factor = 0;
  unsigned reciprocal = 0;  // 2^32 / tiles of a block's buckets, rounded up
  bool direct = false;      // x has columns of its own in the last layer

  Cut(const NetLayout& net, int ranks) {
    const auto over = [](int n, int by) { return (n + by - 1) / by; };
    const int columns = net.columns_of_output();
    hidden_tiles = NetLayout::padded_rows(net.hidden) / kTile;
    bucket_tiles = NetLayout::padded_rows(net.buckets) / kTile;
    hidden_chunks = over(net.hidden, kChunk);
    hidden_rows = over(hidden_chunks, ranks) * kChunk;
    senders = hidden_rows == 0 ? 0 : over(net.hidden, hidden_rows);
    bucket_rows = over(bucket_tiles, ranks) * kTile;
    reciprocal =
        static_cast<unsigned>(((std::int64_t{1} << 32) + bucket_rows / kTile - 1) / (bucket_rows / kTile));
    input_chunks = over(net.inputs, kChunk);
    stride_1 = NetLayout::padded_columns(net.inputs) / kChunk;
    stride_2 = NetLayout::padded_columns(columns) / kChunk;
    direct = net.hidden == 0 || net.residual;
    direct_chunk = net.hidden == 0 ? 0 : net.residual_column() / kChunk;
    net_bytes = net.bytes(), output = net.output_offset(), factor = net.factor_offset();
    tails_1 = net.weight_bytes(net.hidden, net.inputs);
    tails_2 = output + net.weight_bytes(net.buckets, columns);
  }
};

/// The next stride of columns of bytes whose fragments lie in different banks.
inline int free_of_conflicts(int bytes) {
  return (bytes + 63) / 128 * 128 + 64;
}

/// Parts of a block's shared memory, in bytes from its start. Columns of bytes are two for each head.
struct Plan {
  int x = 0, x_stride = 0, h8 = 0, h_stride = 0;  // queries and own hidden units as bytes
  int unlisted = 0, map = 0;                      // of own buckets; which of them are chosen
  int zeros = 0;                                  // bytes of all of these, which begin as 0
  int h = 0;                                      // own hidden units
  int scores = 0;                  // of own buckets; up to `partial`, the best ones' keys later
  int scales_1 = 0, scales_2 = 0;  // of own hidden units, of own buckets; their biases
  int partial = 0;                 // [ranks][own buckets] what each block's units make of them
  int made = 0;                    // what own units make of all buckets
  int group_stats = 0, stats = 0, keys = 0, offsets = 0, total = 0;

  Plan(const NetLayout& net, const Cut& cut, int heads, int ranks) {
    const int tiles = heads <= 4 ? 1 : heads <= 8 ? 2 : 4;
    x_stride = free_of_conflicts(cut.input_chunks * kChunk), h_stride = free_of_conflicts(cut.hidden_rows);
    int at = 0;
    const auto take = [&](int bytes) {
      const int from = at;
      at += (bytes + 127) / 128 * 128;
      return from;
    };
    x = take(8 * tiles * x_stride);
    h8 = take(8 * tiles * h_stride);
    unlisted = take(cut.bucket_rows * 4);
    map = take((cut.bucket_rows + 31) / 32 * 4);
    zeros = at;
    h = take(cut.hidden_rows * tiles * 16);
    scores = take(cut.bucket_rows * tiles * 16);
    scales_1 = take(cut.hidden_rows * 8);
    scales_2 = take(cut.bucket_rows * 8);
    const int all = ranks * cut.bucket_rows;
    partial = take(net.hidden > 0 ? all * tiles * 16 : 0);
    made = take(net.hidden > 0 ? all * tiles * 16 : 0);
    group_stats = take(cut.bucket_rows / 8 * tiles * 32);
    stats = take(ranks * tiles * 32);
    keys = take(all * 4);
    offsets = take((cut.bucket_rows + 1) * 4);
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

/// A piece of weights as a warp holds it.
template <int kPlanes>
struct Piece {
  uint4 half[kPlanes][2];

  static constexpr int kFours = kPlanes * 64;  ///< of 16 bytes each
  /// `from` the lane's own of the piece.
  __device__ __forceinline__ void fetch(const uint4* from) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      half[plane][0] = __ldg(from + plane * 64), half[plane][1] = __ldg(from + plane * 64 + 32);
  }
};

/// A chunk of columns of bytes as the matrix unit takes it.
template <int kTiles>
struct Columns {
  uint4 of[kTiles];

  __device__ __forceinline__ void take(const char* x, int stride) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      of[n] = *reinterpret_cast<const uint4*>(x + (n * 8 + lane / 4) * stride + lane % 4 * 16);
  }
};

/// Sums of a tile: of row lane / 4 (+ 8), for the two bytes of the head lane % 4 of each four.
template <int kPlanes, int kTiles>
struct Sums {
  int c[kPlanes][kTiles][4] = {};

  __device__ __forceinline__ void add(const Piece<kPlanes>& piece, const Columns<kTiles>& x) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint4 low = piece.half[plane][0], high = piece.half[plane][1], b = x.of[n];
        multiply(c[plane][n], low.x, high.x, low.y, high.y, b.x, b.y);
        multiply(c[plane][n], low.z, high.z, low.w, high.w, b.z, b.w);
      }
    }
  }
  /// Of kMostChunks at most.
  __device__ __forceinline__ float whole(int n, int half) const {
    const auto of = [&](int plane) {
      return static_cast<float>(c[plane][n][2 * half] * 256 + c[plane][n][2 * half + 1]);
    };
    return kPlanes == 1 ? of(0) : of(0) * 256.0f + of(kPlanes - 1);
  }
};

}  // namespace lode::cuda
