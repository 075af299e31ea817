// SPDX-License-Identifier: Apache-2.0
// Work map: as decode attention over lists (attend.cu), with two walks instead of one. The first half of the
// blocks that share a list take sink and window, before the kernel in front has ended; then all of them take
// an even share of the stretches. Blocks that start early come first in the grid, all KV heads side by side,
// and so have the window behind them when the choice is there.
//
// Both cuts depend on the position and on how many keys were chosen, alone.
#include <algorithm>

#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/attend_runs.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/scan.cuh"

namespace lode::cuda {

namespace {

struct RunParams {
  Params attend;
  RowRuns runs;
  unsigned dense_reciprocal = 0;  ///< 2^32 / blocks that take sink and window, rounded up
};

/// Keys of one list: sink and window in the first walk, stretches in the second.
struct RunKeys {
  static constexpr bool kArriving = false;
  static constexpr const float* log_weights = nullptr;
  bool dense = true;
  int sink = 0, behind_sink = 0;  ///< what the number of a key of the window and its row differ by
  int run = 0, last_run = 0, tabled = 0, top = 0;  ///< stretches of the block's keys; a step of the search
  const int* starts = nullptr;                     // [runs] shared
  const int* shifts = nullptr;  // [runs] shared; from a key's number to its place in its table
  const std::int32_t* rows = nullptr;
  const std::int32_t* more = nullptr;

  __device__ int row(int key) const {
    if (dense) return key < sink ? key : key + behind_sink;
    int low = run;  // the last stretch that starts at or before the key
#pragma unroll 1
    for (int s = top; s > 0; s /= 2)
      if (low + s <= last_run && starts[low + s] <= key) low += s;
    return __ldcg((low < tabled ? rows : more) + key + shifts[low]);
  }
  __device__ static float weight(int) {
    return 0.0f;
  }
};

/// The keys of a block: its piece of the list, and the stretches of the first and the last key.
struct RunPiece {
  int all = 0, piece = 1, begin = 0, end = 0;
  int first = 0, last = 0;
};

/// Where each stretch starts among the keys of the list, and the piece of this part.
__device__ RunPiece find_starts(const Params& p, const int2* runs /*[2] of the thread*/, int count, int part,
                                int blocks, int* starts, int* shifts) {
  static_assert(RowRuns::kMost == 2 * kThreads);
  __shared__ int of_warps[kWarps], bounds[2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 run[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (2 * static_cast<int>(threadIdx.x) + i < count) run[i] = __ldcg(runs + i);
  const int up_to = sum_up_to(run[0].y + run[1].y, lane);
  if (lane == 31) of_warps[warp] = up_to;
  if (threadIdx.x < 2) bounds[threadIdx.x] = 0;
  __syncthreads();
  int start = up_to - run[0].y - run[1].y, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    start += w < warp ? of_warps[w] : 0;
    all += of_warps[w];
  }
  RunPiece mine = {.all = all, .piece = piece_of(all, p.reciprocal, blocks)};
  mine.begin = part * mine.piece, mine.end = min(all, mine.begin + mine.piece);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = 2 * static_cast<int>(threadIdx.x) + i, behind = start + run[i].y;
    starts[at] = start;
    shifts[at] = run[i].x - start;
    if (start <= mine.begin && mine.begin < behind) bounds[0] = at;
    if (start < mine.end && mine.end <= behind) bounds[1] = at;
    start = behind;
  }
  __syncthreads();
  mine.first = bounds[0], mine.last = bounds[1];
  return mine;
}

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(kThreads, blocks_at_once(D))
    attend_runs_kernel(const __grid_constant__ RunParams r) {
  using W = TileLoop<T, D, kWide, RunKeys, tiles_of_list(D, kWide)>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  __shared__ int starts[RowRuns::kMost], shifts[RowRuns::kMost];
  const Params& p = r.attend;
  const int kv_head = blockIdx.x, part = blockIdx.y, query = blockIdx.z, blocks = gridDim.y;
  const QueryToken token = p.queries.tokens[query];
  const int heads = p.group, warp = threadIdx.x / 32;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + kv_head * heads,
                     list = std::int64_t{query} * gridDim.x + kv_head;
  RunKeys keys;
  W walk(p, keys);
  {
    typename W::RawQueries raw;
    W::template ask_queries<true>(W::queries_at(p.queries.q + first_row * D), heads, raw);
    walk.base = load_here(p.queries.bases + token.sequence) + p.queries.layer_offset +
                kv_head * p.queries.layout.head_stride();
    walk.pack_queries(raw);
  }
  const int all = token.position + 1;
  keys.sink = static_cast<int>(min(r.runs.sink, std::int64_t{all}));
  const int window_begin = static_cast<int>(max(std::int64_t{keys.sink}, all - r.runs.window));
  keys.behind_sink = window_begin - keys.sink;
  const int dense = all - keys.behind_sink, dense_piece = piece_of(dense, r.dense_reciprocal, blocks),
            dense_parts = (dense + dense_piece - 1) / dense_piece;
  int begin = part * dense_piece, end = min(dense, begin + dense_piece), parts = 1;
  unsigned ticket = 0;
  walk.ring = shared_address(shared) + warp * kRing;
  walk.clear();
  keys.starts = starts, keys.shifts = shifts, keys.tabled = r.runs.tabled;
  keys.rows = r.runs.rows + (std::int64_t{token.sequence} * gridDim.x + kv_head) * r.runs.row_stride;
  keys.more = r.runs.more + list * r.runs.more_stride;
  auto runs = reinterpret_cast<const int2*>(r.runs.runs + list * r.runs.count) + 2 * threadIdx.x;
  asm volatile("" : "+l"(keys.rows), "+l"(keys.more), "+l"(runs));  // worked out here
  Ending<D> ending(p, list, first_row, heads, part, shared);
#pragma unroll 1
  for (int walked = 0; walked < 2; ++walked) {
    if (walked == 1) {
      wait_for_predecessor();
      release_successor();
      keys.dense = false;
      const RunPiece mine = find_starts(p, runs, r.runs.count, part, blocks, starts, shifts);
      if (part == 0 && threadIdx.x == 0) r.runs.counts[list] = mine.all;
      parts = max(1, max(dense_parts, (mine.all + mine.piece - 1) / mine.piece));
      if (part >= parts) return;
      if (parts > 1 && threadIdx.x == 0) ticket = take_ticket(p, list);
      keys.run = mine.first, keys.last_run = mine.last;
      keys.top = mine.last > mine.first ? 1 << (31 - __clz(mine.last - mine.first)) : 0;
      begin = mine.begin, end = mine.end;
    }
    walk.take(begin, end);
    walk.begin(walk.ask_rows());
    if (walked == 1) ending.draw(ticket, parts);  // while tiles are under way
    walk.walk_on();
  }
  walk.finish();

  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  __syncthreads();
  ending.template run<kRing>();
}

template <class T, int D, bool kWide>
void launch(const RunParams& r, StreamHandle stream) {
  using W = TileLoop<T, D, kWide, RunKeys, tiles_of_list(D, kWide)>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes, kTables = RowRuns::kMost * 8;
  constexpr auto kernel = attend_runs_kernel<T, D, kWide>;
  reserve_once<kernel>(kShared, kShared + kTables, blocks_at_once(D));
  const dim3 grid(static_cast<unsigned>(r.attend.queries.layout.kv_heads),
                  static_cast<unsigned>(r.attend.blocks), static_cast<unsigned>(r.attend.queries.count));
  EarlyLaunch(grid, kThreads, kShared, 1, stream)(kernel, r);
}

template <class T, int D>
void launch_for_group(const RunParams& r, StreamHandle stream) {
  r.attend.group > 8 ? launch<T, D, true>(r, stream) : launch<T, D, false>(r, stream);
}

template <class T>
void launch_for(const RunParams& r, StreamHandle stream) {
  r.attend.queries.layout.head_dim == 64 ? launch_for_group<T, 64>(r, stream)
                                         : launch_for_group<T, 128>(r, stream);
}

constexpr int kListThreads = 1024, kListBlocks = 8;

/// A block of kListBlocks for each list; stretches are looked at so many at a time.
__global__ void __launch_bounds__(kListThreads)
    list_kernel(Queries queries, RowRuns runs, std::int32_t* rows) {
  __shared__ int starts[kListThreads], of_warps[32];
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32,
            list = static_cast<int>(blockIdx.y), kv_heads = queries.layout.kv_heads;
  const std::int32_t sequence = queries.tokens[list / kv_heads].sequence;
  const std::int32_t* const tabled =
      runs.rows + (std::int64_t{sequence} * kv_heads + list % kv_heads) * runs.row_stride;
  const std::int32_t* const more = runs.more + list * runs.more_stride;
  const RowRun* const all = runs.runs + std::int64_t{list} * runs.count;
  std::int64_t before = 0;  // keys of the stretches in front of these
  for (int first = 0; first < runs.count; first += kListThreads) {
    const int count = first + tid < runs.count ? all[first + tid].count : 0;
    const int up_to = sum_up_to(count, lane);
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
    int in_front = 0, sum = 0;
    for (int w = 0; w < 32; ++w) in_front += w < warp ? of_warps[w] : 0, sum += of_warps[w];
    starts[tid] = in_front + up_to - count;
    __syncthreads();
    for (int run = warp * kListBlocks + static_cast<int>(blockIdx.x);
         run < kListThreads && first + run < runs.count; run += 32 * kListBlocks) {
      const RowRun one = all[first + run];
      const std::int32_t* const from = (first + run < runs.tabled ? tabled : more) + one.first;
      for (int i = lane; i < one.count; i += 32) {
        const std::int64_t to = before + starts[run] + i;
        if (to < runs.capacity) rows[list * runs.capacity + to] = from[i];
      }
    }
    before += sum;
    __syncthreads();
  }
  if (blockIdx.x == 0 && tid == 0) runs.counts[list] = static_cast<std::int32_t>(min(before, runs.capacity));
}

}  // namespace

bool can_attend_runs(const KvLayout& layout, int group) {
  const bool narrow = layout.type == DType::bf16 || layout.type == DType::f16;
  return narrow && !layout.shared_rows && group <= 16 && (layout.head_dim == 64 || layout.head_dim == 128);
}

void attend_runs_decode(const Queries& queries, const RowRuns& runs, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream) {
  if (queries.count == 0) return;
  RunParams r = {.attend = {.queries = queries}, .runs = runs};
  share_out(r.attend, std::min(max_tokens, runs.sink + runs.capacity + runs.window), workspace, stream);
  r.dense_reciprocal = reciprocal_of((r.attend.most_parts + 1) / 2);
  queries.layout.type == DType::bf16 ? launch_for<__nv_bfloat16>(r, stream) : launch_for<__half>(r, stream);
}

void list_runs(const Queries& queries, const RowRuns& runs, std::int32_t* rows, StreamHandle stream) {
  if (queries.count == 0) return;
  const dim3 grid(kListBlocks, static_cast<unsigned>(queries.count * queries.layout.kv_heads));
  Launch(grid, kListThreads, 0, stream)(list_kernel, queries, runs, rows);
}

}  // namespace lode::cuda
