// SPDX-License-Identifier: Apache-2.0
// The work map, the pieces and the order of merging are those of attend.cu. The warps of a block share the numbers of a
// head, not the keys: each walks over all tiles of the piece with a slice of 128 numbers of every key and value, in the
// registers and shared memory of a walk over heads of 128. A tile's scores are the sum of what the four warps have, in
// shared memory; weights are then the same in all of them, and so are maxima and sums.
#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/attend_large.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kSlice = kLargeDim / kWarps;

/// A slice of the rows of a KV head in the blocks of the engine's ranges.
struct SliceInBlocks : InBlocks<kLargeDim> {
  static constexpr int kTurns = 1;
};

template <class T, bool kWide>
struct SliceLoop : TileLoop<T, kSlice, kWide, Keys, 2, SliceInBlocks> {
  using Base = TileLoop<T, kSlice, kWide, Keys, 2, SliceInBlocks>;
  using Base::Base, Base::first, Base::kHeadTiles, Base::kStageBytes, Base::kStages, Base::mine, Base::ring;
  /// Scores of a tile: of each warp, for one tile and for the next.
  using Shared = float[2][kWarps][kHeadTiles * 4][32];

  /// All warps' scores of a tile together. A warp that writes those of the tile after the next has met the others in
  /// between, so they have read these.
  __device__ __forceinline__ void sum_over_warps(int tile, Shared& shared, float (&s)[kHeadTiles][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kHeadTiles * 4; ++i) shared[tile % 2][warp][i][lane] = s[i / 4][i % 4];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHeadTiles * 4; ++i) {
      float sum = shared[tile % 2][0][i][lane];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += shared[tile % 2][w][i][lane];
      s[i / 4][i % 4] = sum;
    }
  }

  /// The walk, once begun, by all warps together.
  __device__ __forceinline__ void walk_together(Shared& shared) {
#pragma unroll 1
    for (int tile = 0; tile < mine; ++tile) {
      const unsigned stage = ring + tile % kStages * kStageBytes;
      float s[kHeadTiles][4] = {};
      this->wait_for_oldest();
      this->score(stage, s);
      sum_over_warps(tile, shared, s);
      this->fetch_keys(tile + kStages);
      this->wait_for_oldest();
      this->weigh(stage, first + tile * kTile, s);
      __syncwarp();
      this->fetch_values(tile + kStages);
    }
    asm volatile("cp.async.wait_all;");
  }
};

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads, blocks_at_once(kLargeDim))
    attend_large_kernel(const __grid_constant__ Params p) {
  using W = SliceLoop<T, kWide>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kWarps * kRing >= (kWide ? 16 : 8) * (kLargeDim + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  __shared__ typename W::Shared scores;
  const int query = blockIdx.z, part = blockIdx.x, warp = threadIdx.x / 32;
  const QueryToken token = p.queries.tokens[query];
  const int kv_head = p.lists_per_head == 1 ? blockIdx.y : blockIdx.y / p.lists_per_head;
  const int heads = p.lists_per_head == 1 ? p.group : 1;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + blockIdx.y * heads;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  wait_for_predecessor();
  release_successor();
  const Keys keys(p, token.position, list, p.has_lists ? load_here(p.lists.counts + list) : 0);
  const Share share(p, keys.count, blockIdx.x, gridDim.x);
  if (share.has_none(keys.count)) return;
  W walk(p, keys);
  walk.base = load_here(p.queries.bases + token.sequence) + p.queries.layer_offset +
              kv_head * p.queries.layout.head_stride() + warp * kSlice * std::int64_t{sizeof(T)};
  walk.ring = shared_address(shared) + warp * kRing;
  walk.take(share.begin, share.end(keys.count), 0);
  const int rows = walk.ask_rows();
  typename W::RawQueries raw;
  W::ask_queries(W::queries_at(p.queries.q + first_row * kLargeDim + warp * kSlice), heads, raw);
  unsigned ticket = 0;
  if (keys.count > share.piece && threadIdx.x == 0) ticket = take_ticket(p, list);
  walk.begin(rows);
  walk.pack_queries(raw);
  Ending<kLargeDim, 1> ending(p, list, first_row, heads, part, shared);  // while tiles are under way
  walk.clear();
  ending.draw(ticket, share.parts(keys.count));
  walk.walk_together(scores);
  walk.finish();
  __syncthreads();  // the state lies where others' tiles did
  walk.store(reinterpret_cast<float*>(shared), heads, 0, warp * kSlice);
  __syncthreads();
  ending.template run<0>();
}

template <class T, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  using W = SliceLoop<T, kWide>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes,
                kOccupied = kShared + static_cast<int>(sizeof(typename W::Shared));
  constexpr auto kernel = attend_large_kernel<T, kWide>;
  reserve_once<kernel>(kShared, kOccupied, blocks_at_once(kLargeDim));
  const dim3 grid(static_cast<unsigned>(p.blocks),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                  static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, kShared, 1, stream)(kernel, p);
}

template <class T>
void launch_for(const Params& p, StreamHandle stream) {
  p.group > 8 && p.lists_per_head == 1 ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

}  // namespace

bool attend_large(const Params& p, StreamHandle stream) {
  const DType type = p.queries.layout.type;
  if (p.queries.layout.head_dim != kLargeDim || p.group > 16) return false;
  if (type == DType::bf16) return launch_for<__nv_bfloat16>(p, stream), true;
  if (type == DType::f16) return launch_for<__half>(p, stream), true;
  return false;
}

}  // namespace lode::cuda
