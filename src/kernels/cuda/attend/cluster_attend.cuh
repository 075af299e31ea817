// SPDX-License-Identifier: Apache-2.0
// Attention of one list by the cluster of blocks that has chosen its keys: the list is cut into pieces, as
// many for each block, four warps walk over a piece (tile_loop.cuh), and blocks send the states of each
// column to one that merges them. How many blocks the cluster has does not change a bit. No list is written
// to device memory, no kernel launched, no block waits for another list's.
#pragma once

#include "kernels/cuda/attend/tile_loop.cuh"
#include "kernels/cuda/device/cta_cluster_mailbox.cuh"

namespace lode::cuda {

template <class T, int D, int kHeads, int kRanks, int kPieces, int kAtOnce>
struct ClusterAttend {
  using W = TileLoop<T, D, (kHeads > 8)>;
  static constexpr int kRing = W::kStages * W::kStageBytes;
  static constexpr int kColumns = kHeads * D / 4;  ///< fours of the output
  static constexpr int kOwn = kColumns / kRanks;   ///< of them that a block merges
  static constexpr int kOwnPieces = kPieces / kRanks;
  /// Half of a block's warps walk over kAtOnce pieces at a time, and the other half sends their states while
  /// the next ones are walked. States lie in the rings where nothing comes behind them.
  static constexpr int kWalkers = kAtOnce * kWarps, kTurns = kOwnPieces / kAtOnce;
  static constexpr int kRings = kWalkers * kRing, kStates = kTurns == 1 ? 0 : kRings;
  static constexpr int kState = kTurns == 1 ? kRing : (kHeads * (D + 2) * 4 + 15) / 16 * 16;
  static constexpr int kBytes = kRings + (kTurns == 1 ? 0 : kWalkers * kState);
  static_assert(kColumns % kRanks == 0 && kRing >= kHeads * (D + 2) * 4);
  static_assert(kPieces % kRanks == 0 && kOwnPieces % kAtOnce == 0);

  /// States of a block's own columns, of all pieces.
  struct Received {
    float4 o[kOwn][kPieces];
    float2 ml[kOwn][kPieces];
    Inbox inbox;
  };

  /// Keys of a piece of a list of so many.
  __device__ static int piece_of(int count) {
    return (count + kPieces * kTile - 1) / (kPieces * kTile) * kTile;
  }

  /// The block's pieces of `piece` keys each, and the output. `q` [kHeads, D]; by the whole block, after all
  /// have left the ring; `wait_for_rows` is called by who walks, when all else is ready.
  template <class WaitForRows>
  __device__ static void run(const Params& p, const Keys& keys, int piece, const char* base, const float* q,
                             char* memory, Received& received, int rank, float* out /*[kHeads, D]*/,
                             WaitForRows wait_for_rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32, first_piece = rank * kOwnPieces;
    if (warp < kWalkers) {
      W walk(p, keys);
      typename W::RawQueries raw;
      W::ask_queries(W::queries_at(q), kHeads, raw);
      walk.base = base;
      walk.ring = shared_address(memory) + warp * kRing;
      walk.pack_queries(raw);
      wait_for_rows();
      walk_over(walk, piece, first_piece + warp / kWarps, memory + kStates);
    } else {
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        meet(kFull);
        send_states(memory + kStates, received, first_piece + turn * kAtOnce);
        if (turn + 1 < kTurns) arrive(kFree);
      }
    }
    merge(received, rank, out);
  }

  static constexpr unsigned kMergeBytes = kOwn * kPieces * 24;  ///< what Received::inbox is to expect

 private:
  /// Barriers of the block by number: states are there, and their place is free.
  static constexpr int kFull = 1, kFree = 2;
  __device__ static void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(2 * kWalkers * 32) : "memory");
  }
  __device__ static void arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(2 * kWalkers * 32) : "memory");
  }

  /// A warp's part of pieces `at`, at + kAtOnce, ... Keys of the next one are on their way before the state
  /// of this is left, and warps take turns with its four sequences of tiles: the first may be a tile longer.
  __device__ static void walk_over(W& walk, int piece, int at, char* states) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const auto begin = [&](int turn) {
      const int from = (at + turn * kAtOnce) * piece;
      walk.take(from, min(walk.keys.count, from + piece), (warp + turn) % kWarps);
      walk.begin(walk.ask_rows());
    };
    begin(0);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      walk.clear();
      walk.walk_on();
      walk.finish();
      if (turn + 1 < kTurns) begin(turn + 1);
      if (turn > 0) meet(kFree);
      const int place = warp / kWarps * kWarps + (warp + turn) % kWarps;
      walk.store(reinterpret_cast<float*>(states + place * kState), kHeads);
      arrive(kFull);
    }
  }

  /// Those of the pieces that were walked at once, to the owners of the columns; by who does not walk.
  __device__ static void send_states(const char* states, Received& received, int first_piece) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) - kWalkers * 32; i < kAtOnce * kColumns; i += kWalkers * 32) {
      const int which = i / kColumns, column = i % kColumns, piece = first_piece + which;
      float4 o = {};
      float m = -INFINITY, l = 0.0f;
      merge_warps(states + which * kWarps * kState, column, o, m, l);
      const int owner = column / kOwn, at = column % kOwn;
      const unsigned inbox = address_in(&received.inbox, owner);
      const uint4 bits = {__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z),
                          __float_as_uint(o.w)};
      send(address_in(&received.o[at][piece], owner), bits, inbox);
      send(address_in(&received.ml[at][piece], owner), make_float2(m, l), inbox);
    }
  }
  /// All pieces' states of the block's own columns.
  __device__ static void merge(const Received& received, int rank, float* out) {
    wait_for(&received.inbox);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kOwn * kPieces; i += static_cast<int>(blockDim.x)) {
      const int at = i / kPieces, from = i % kPieces;
      float4 o = received.o[at][from];
      const float2 ml = received.ml[at][from];
      float peak = ml.x;
#pragma unroll
      for (int other = 1; other < kPieces; other *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, other));
      const float factor = decay(ml.x, peak);
      float sum = ml.y * factor;
      o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
#pragma unroll
      for (int other = 1; other < kPieces; other *= 2) {
        sum += __shfl_xor_sync(~0u, sum, other);
        o.x += __shfl_xor_sync(~0u, o.x, other), o.y += __shfl_xor_sync(~0u, o.y, other);
        o.z += __shfl_xor_sync(~0u, o.z, other), o.w += __shfl_xor_sync(~0u, o.w, other);
      }
      const float inverse = sum == 0.0f ? 0.0f : reciprocal(sum);
      if (from == 0)
        *reinterpret_cast<float4*>(out + (rank * kOwn + at) * 4) = {o.x * inverse, o.y * inverse,
                                                                    o.z * inverse, o.w * inverse};
    }
  }
  __device__ static void merge_warps(const char* states, int column, float4& o, float& m, float& l) {
    float4 x[kWarps];
    float2 ml[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* const state = reinterpret_cast<const float*>(states + w * kState);
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
