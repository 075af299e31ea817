// SPDX-License-Identifier: Apache-2.0
// Attention of one list by the cluster of blocks that has chosen its keys: each block takes as many keys,
// four of its warps walk over them (attend_walk.cuh), and blocks send the states of each column to one that
// merges them. No list is written to device memory, no kernel launched, no block waits for another list's.
#pragma once

#include "kernels/cuda/attend_walk.cuh"
#include "kernels/cuda/cluster_link.cuh"

namespace lode::cuda {

template <class T, int D, int kHeads, int kRanks>
struct ClusterAttend {
  using W = Walk<T, D, (kHeads > 8)>;
  static constexpr int kRing = W::kStages * W::kStageBytes;
  static constexpr int kRingBytes = kWarps * kRing;  ///< of a block
  static constexpr int kColumns = kHeads * D / 4;    ///< fours of the output
  static constexpr int kOwn = kColumns / kRanks;     ///< of them that a block merges
  static_assert(kColumns % kRanks == 0 && kRing >= kHeads * (D + 2) * 4);

  /// States of a block's own columns, from all blocks.
  struct Received {
    float4 o[kOwn][kRanks];
    float2 ml[kOwn][kRanks];
    Inbox inbox;
  };

  /// Keys of one block where `count` are cut into even pieces.
  __device__ static int piece_of(int count) {
    return (count + kRanks * kTile - 1) / (kRanks * kTile) * kTile;
  }

  /// Walks over keys [begin, end): the first kWarps warps, with `ring` to themselves. Call after all warps
  /// have left the ring; `q` [kHeads, D].
  __device__ static void walk(const Params& p, const Keys& keys, int begin, int end, const char* base,
                              const float* q, char* ring) {
    typename W::RawQueries raw;
    W::ask_queries(q, kHeads, raw);
    W walk(p, keys);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    walk.base = base;
    walk.end = end;
    walk.first = begin + warp * kTile;
    walk.mine = max(0, (end - walk.first + kWarps * kTile - 1) / (kWarps * kTile));
    walk.ring = shared_address(ring) + warp * kRing;
    walk.run(raw);
    walk.store(reinterpret_cast<float*>(ring + warp * kRing), kHeads);
  }

  /// Merges the states of all blocks' warps. Called by the whole block after a barrier behind walk().
  __device__ static void merge(const char* ring, Received& received, int rank, float* out /*[kHeads, D]*/) {
    for (int column = static_cast<int>(threadIdx.x); column < kColumns;
         column += static_cast<int>(blockDim.x)) {
      float4 o = {};
      float m = -INFINITY, l = 0.0f;
      merge_warps(ring, column, o, m, l);
      const int owner = column / kOwn, at = column % kOwn;
      const unsigned inbox = address_in(&received.inbox, owner);
      const uint4 bits = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z),
                          __float_as_uint(o.w)};
      send(address_in(&received.o[at][rank], owner), bits, inbox);
      send(address_in(&received.ml[at][rank], owner), make_float2(m, l), inbox);
    }
    wait_for(&received.inbox);
    for (int i = static_cast<int>(threadIdx.x); i < kOwn * kRanks; i += static_cast<int>(blockDim.x)) {
      const int at = i / kRanks, from = i % kRanks;
      float4 o = received.o[at][from];
      const float2 ml = received.ml[at][from];
      float peak = ml.x;
#pragma unroll
      for (int other = 1; other < kRanks; other *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, other));
      const float factor = decay(ml.x, peak);
      float sum = ml.y * factor;
      o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
#pragma unroll
      for (int other = 1; other < kRanks; other *= 2) {
        sum += __shfl_xor_sync(~0u, sum, other);
        o.x += __shfl_xor_sync(~0u, o.x, other), o.y += __shfl_xor_sync(~0u, o.y, other);
        o.z += __shfl_xor_sync(~0u, o.z, other), o.w += __shfl_xor_sync(~0u, o.w, other);
      }
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (from == 0)
        *reinterpret_cast<float4*>(out + (rank * kOwn + at) * 4) = {o.x * inverse, o.y * inverse,
                                                                    o.z * inverse, o.w * inverse};
    }
  }
  static constexpr unsigned kMergeBytes = kOwn * kRanks * 24;  ///< what Received::inbox is to expect

 private:
  __device__ static void merge_warps(const char* ring, int column, float4& o, float& m, float& l) {
    float4 x[kWarps];
    float2 ml[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* const state = reinterpret_cast<const float*>(ring + w * kRing);
      x[w] = *reinterpret_cast<const float4*>(state + column * 4);
      ml[w] = *reinterpret_cast<const float2*>(state + kHeads * D + column * 4 / D * 2);
      m = fmaxf(m, ml[w].x);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = decay(ml[w].x, m);
      o.x += factor * x[w].x, o.y += factor * x[w].y, o.z += factor * x[w].z, o.w += factor * x[w].w;
      l += factor * ml[w].y;
    }
  }
};

}  // namespace lode::cuda
