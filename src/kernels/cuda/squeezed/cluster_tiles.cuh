// SPDX-License-Identifier: Apache-2.0
// Sixteen nodes as the matrix unit takes them, and their products with four queries: what the choice of
// clusters streams (clusters.cu).
//
//   S[16 nodes, 8] = C q^T: the eight columns are four queries, each as two numbers of the nodes' type that
//   make up one; a lane has both parts of two nodes' sums.
//
//   f16  m16n8k16; a query is the sum of two halves, 22 bits
//   q8   m16n8k32; a query is 256 a + b of whole numbers, 16 bits of its largest component, and sums are
//        exact; spreads are multiplied likewise with the squares of the query's length in each plane
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/squeezed/clusters.h"

namespace lode::cuda {

inline constexpr int kTileNodes = 16, kPieceDims = 32;  // a piece: what 32 lanes hold with one number each

/// A tile in device memory: rows of 16 bytes a lane, then scales by pairs of nodes (i, i + 8).
struct TileLayout {
  int fours = 0, scales = 0;  ///< rows; numbers a node
  __host__ __device__ constexpr TileLayout(int pieces, CentroidKind kind)
      : fours(kind == CentroidKind::f16  ? 2 * pieces
              : kind == CentroidKind::q8 ? pieces
                                         : pieces + of_spreads(pieces)),
        scales(kind == CentroidKind::f16  ? 0
               : kind == CentroidKind::q8 ? 1
                                          : 2) {}
  /// Pieces of half as many dimensions.
  __host__ __device__ static constexpr int of_spreads(int pieces) { return (pieces + 1) / 2; }
  __host__ __device__ constexpr int bytes() const { return fours * 512 + scales * kTileNodes * 4; }
};

/// By what products are multiplied to be logits to the base 2, and roots of sums of squares to be deviations.
struct QueryUnits {
  float logit = 0.0f, deviation = 0.0f;
};

constexpr float kLog2e = 1.44269504f;

template <int kPieces, CentroidKind kKind>
struct Tiles;

template <int kPieces>
struct Tiles<kPieces, CentroidKind::f16> {
  static constexpr TileLayout kLayout{kPieces, CentroidKind::f16};
  static constexpr int kQueryBytes = kPieces * 512;  ///< of four queries in shared memory
  static constexpr bool kHasSpreads = false;
  static constexpr float kRootOfSquares = 0.0f;

  struct Held {
    uint4 rows[kLayout.fours];
  };
  __device__ static void fetch(const char* tile, int lane, Held& to) {
#pragma unroll
    for (int i = 0; i < kLayout.fours; ++i)
      to.rows[i] = __ldg(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
  }

  /// Component 32 i + lane of the query `place` is x[i], its partner in the plane is partner[i], all finite
  /// and at most `peak`; returns by what they were multiplied, 0 where all are 0. Scaled to a peak of 128 to
  /// 256.
  __device__ static float put(char* queries, int place, int lane, const float (&x)[kPieces],
                              const float (&)[kPieces], float peak) {
    const float by = peak == 0.0f ? 0.0f : exp2f(static_cast<float>(min(100, 7 - ilogbf(peak))));
    __half* const to = reinterpret_cast<__half*>(queries);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float scaled = x[i] * by;
      const __half high = __float2half_rn(scaled);
      const int at = (i * 32 + 2 * place * 4 + lane / 8) * 8 + lane % 8;
      to[at] = high;
      to[at + 32] = __float2half_rn(scaled - __half2float(high));
    }
    return by;
  }

  /// What a lane needs of the queries.
  struct Asked {
    const uint4* from;
  };
  __device__ static Asked ask(const char* queries, int lane) {
    return {reinterpret_cast<const uint4*>(queries) + lane};
  }

  /// Logits to the base 2 of nodes lane / 4 and lane / 4 + 8 for query lane % 4.
  __device__ static float2 logits(const Held& held, const Asked& q, const QueryUnits& units, float2) {
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 low = held.rows[2 * i], high = held.rows[2 * i + 1], b = q.from[i * 32];
      multiply(c, low.x, high.x, low.y, high.y, b.x, b.y);
      multiply(c, low.z, high.z, low.w, high.w, b.z, b.w);
    }
    return make_float2((c[0] + c[1]) * units.logit, (c[2] + c[3]) * units.logit);
  }

 private:
  __device__ static void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                  unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

/// Both kinds of 8 bits.
template <int kPieces, bool kSpreads>
struct ByteTiles {
  static constexpr TileLayout kLayout{kPieces, kSpreads ? CentroidKind::q8_spreads : CentroidKind::q8};
  static constexpr bool kHasSpreads = kSpreads;
  static constexpr int kOfSpreads = kSpreads ? TileLayout::of_spreads(kPieces) : 0;  ///< pieces
  static constexpr int kOfQueries = kPieces * 256, kQueryBytes = kOfQueries + kOfSpreads * 256;
  static constexpr float kMostWhole = 32512.0f;   ///< 127 * 256
  static constexpr float kSquareUnit = 32768.0f;  ///< squares are divided by it, to have 16 bits
  static constexpr float kRootOfSquares = 181.019336f;
  static constexpr float kLargestSpread = 1e15f;  ///< of a logit: its square is still a float

  struct Held {
    uint4 rows[kLayout.fours];
    float2 scales[kLayout.scales];  ///< of centroids; the roots of those of spreads
  };
  __device__ static void fetch(const char* tile, int lane, Held& to) {
#pragma unroll
    for (int i = 0; i < kLayout.fours; ++i)
      to.rows[i] = __ldg(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < kLayout.scales; ++i)
      to.scales[i] = __ldg(reinterpret_cast<const float2*>(tile + kLayout.fours * 512) + i * 8 + lane / 4);
  }

  __device__ static float put(char* queries, int place, int lane, const float (&x)[kPieces],
                              const float (&partner)[kPieces], float peak) {
    const float by = peak == 0.0f ? 0.0f : fminf(kMostWhole / peak, 0x1p100f);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      char* const to = queries + (i * 32 + 2 * place * 4 + lane / 8) * 8 + lane % 8;
      const float scaled = x[i] * by;
      const int whole = __float2int_rn(scaled), high = (whole + 128) >> 8;
      to[0] = static_cast<char>(high), to[32] = static_cast<char>(whole - high * 256);
      if (i < kOfSpreads) {
        const float other = partner[i] * by;
        const int square = __float2int_rn((scaled * scaled + other * other) * (1.0f / kSquareUnit));
        to[kOfQueries] = static_cast<char>(square >> 8), to[kOfQueries + 32] = static_cast<char>(square);
      }
    }
    return by;
  }

  struct Asked {
    uint2 q[kPieces], squares[kSpreads ? kOfSpreads : 1];
  };
  __device__ static Asked ask(const char* queries, int lane) {
    Asked asked;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      asked.q[i] = reinterpret_cast<const uint2*>(queries)[i * 32 + lane];
      if (i < kOfSpreads)
        asked.squares[i] = reinterpret_cast<const uint2*>(queries + kOfQueries)[i * 32 + lane];
    }
    return asked;
  }

  /// `keys` are the nodes' numbers of keys.
  __device__ static float2 logits(const Held& held, const Asked& asked, const QueryUnits& units,
                                  float2 keys) {
    int c[4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) multiply(c, held.rows[i], asked.q[i]);
    float2 z = {static_cast<float>(c[0] * 256 + c[1]) * units.logit * held.scales[0].x,
                static_cast<float>(c[2] * 256 + c[3]) * units.logit * held.scales[0].y};
    if constexpr (kSpreads) {
      int s[4] = {};
#pragma unroll
      for (int i = 0; i < kOfSpreads; ++i) multiply_squares(s, held.rows[kPieces + i], asked.squares[i]);
      z.x += of_spread(s[0] * 256 + s[1], units.deviation, held.scales[1].x, keys.x);
      z.y += of_spread(s[2] * 256 + s[3], units.deviation, held.scales[1].y, keys.y);
    }
    return z;
  }

 private:
  /// What a node's score gains by its spread, to the base 2: add_spread of select/squeezed/squeezed.cc.
  __device__ static float of_spread(int sum, float unit, float root, float keys) {
    const float s = fminf(sqrt_fast(static_cast<float>(sum)) * unit * root, kLargestSpread),
                most = sqrt_fast(2.0f / kLog2e * __log2f(keys)), below = fminf(s, most);
    return kLog2e * below * (s - 0.5f * below);
  }
  __device__ static void multiply(int (&c)[4], const uint4& a, const uint2& b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(b.x), "r"(b.y));
  }
  __device__ static void multiply_squares(int (&c)[4], const uint4& a, const uint2& b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(b.x), "r"(b.y));
  }
};

template <int kPieces>
struct Tiles<kPieces, CentroidKind::q8> : ByteTiles<kPieces, false> {};
template <int kPieces>
struct Tiles<kPieces, CentroidKind::q8_spreads> : ByteTiles<kPieces, true> {};

}  // namespace lode::cuda
