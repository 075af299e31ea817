// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (blocks that share a list, KV heads x lists, query tokens), kWarps warps a block. The keys
// of a list (sink, rows, window, in that order) are cut into pieces that depend on their number alone; a
// block owns one, its warps take tiles of 16 keys in turn (attend_walk.cuh). A block merges the states of its
// warps in shared memory and posts the result; the blocks of the list that started last merge what all have
// posted (attend_merge.cuh). The order of merging is fixed.
//
// The block that started last waits only for blocks that run already; those a few places before it may wait
// for some that have not started, but they are never more than half as many as there are processors, in all
// lists together, so that the others find room.
//
// Launched while the kernel in front still runs: where tokens and keys stand is looked up at once, and the
// first keys that no list names are brought into the second-level cache. That is where writes meet, so
// nothing stale can come of it. Everything else is read once the kernel in front has ended.
#include <algorithm>

#include "kernels/cuda/attend_generic.h"
#include "kernels/cuda/attend_merge.cuh"
#include "kernels/cuda/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kLeastKeys = kWarps * kTile;  // of a piece
constexpr int kSlots = 132;                 // processors of an H200
constexpr int kTickets = 1 << 16;

/// Blocks that a processor works on at once.
constexpr int blocks_at_once(int head_dim) {
  return head_dim <= 128 ? 2 : 1;
}
/// Blocks that share a list. Bits depend on the number of KV heads by this.
int parts_for(int kv_heads, int head_dim) {
  return std::max(1, kSlots * blocks_at_once(head_dim) / kv_heads);
}
int processors() {
  static const int count = [] {
    int device = 0, found = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device));
    return found;
  }();
  return count;
}

/// The states of the block's warps, in shared memory, for four columns.
template <int D>
__device__ Record merge_warps(const char* rings, int ring_bytes, int heads, int column) {
  Record x[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float* const state = reinterpret_cast<const float*>(rings + w * ring_bytes);
    x[w].o = *reinterpret_cast<const float4*>(state + column * 4);
    const float2 ml = *reinterpret_cast<const float2*>(state + heads * D + column * 4 / D * 2);
    x[w].m = ml.x, x[w].l = ml.y;
  }
  return together(x, peak_of(x));
}

/// Four merged numbers to their place: normalised, the tail merged last.
template <int D>
__device__ void write_result(const Params& p, std::int64_t first_row, int column, const Record& sum) {
  const int head = column * 4 / D, at = column * 4 % D;
  const std::int64_t row = first_row + head;
  const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;
  float4 x = {sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse};
  const bool has_tail = p.lists.tail_lse != nullptr && p.lists.tail_lse[row] != -INFINITY;
  if (has_tail || p.queries.lse != nullptr) {
    float lse = sum.l == 0.0f ? -INFINITY : (sum.m == -INFINITY ? 0.0f : sum.m) * kLn2 + logf(sum.l);
    if (has_tail) {
      const float tail = p.lists.tail_lse[row], peak = fmaxf(lse, tail);
      const float mine = lse == -INFINITY ? 0.0f : expf(lse - peak), theirs = expf(tail - peak);
      const float keep = mine / (mine + theirs), more = theirs / (mine + theirs);
      const float4 y = *reinterpret_cast<const float4*>(p.lists.tail_output + row * D + at);
      x = {x.x * keep + y.x * more, x.y * keep + y.y * more, x.z * keep + y.z * more,
           x.w * keep + y.w * more};
      lse = peak + logf(mine + theirs);
    }
    if (p.queries.lse != nullptr && at == 0) p.queries.lse[row] = lse;
  }
  *reinterpret_cast<float4*>(p.queries.o + row * D + at) = x;
}

/// The records that all blocks of the list posted; `to_come` of its blocks started later than this one.
template <int D>
__device__ void merge_posted(const Params& p, const Posted& posted, std::int64_t first_row, int columns,
                             int parts, int to_come) {
  __shared__ Record of_warps[kWarps][4];
  const int mergers = min(p.most_mergers, parts), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool apart = parts <= kSubs * kAhead;  // a warp takes a group of columns by itself
  const int at_once = apart ? kWarps : 1, groups = columns / 4;
  for (int from = to_come * at_once; from < groups; from += mergers * at_once) {
    const int group = apart ? from + warp : from;
    if (apart) {
      if (group >= groups) break;
      const Record sum = take_posted(posted, group, parts, lane / 4, kSubs);
      if (lane < 4) write_result<D>(p, first_row, group * 4 + lane, sum);
      continue;
    }
    const Record sum = take_posted(posted, group, parts, warp * kSubs + lane / 4, kWarps * kSubs);
    if (lane < 4) of_warps[warp][lane] = sum;
    __syncthreads();
    if (threadIdx.x < 4) {
      Record x[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x[w] = of_warps[w][threadIdx.x];
      write_result<D>(p, first_row, group * 4 + threadIdx.x, together(x, peak_of(x)));
    }
    __syncthreads();
  }
}

/// Keys of a piece of a list of so many: whole tiles, a tile for each warp or more.
__device__ __forceinline__ int piece_of(const Params& p, int keys) {
  const unsigned even = __umulhi(static_cast<unsigned>(keys), p.reciprocal) + 1;
  const int piece = max(kLeastKeys, static_cast<int>((even + kTile - 1) / kTile * kTile));
  const int blocks = static_cast<int>(gridDim.x);  // enough, unless there are more keys than was said
  return std::int64_t{piece} * blocks >= keys ? piece : (keys + blocks - 1) / blocks;
}

/// Brings the first tile of each of the block's warps into the second-level cache, where all keys are
/// attended.
template <int D>
__device__ __forceinline__ void prefetch_first(const Params& p, const char* from, int keys) {
  constexpr int kLine = 128, kLines = (D * 2 + kLine - 1) / kLine;  // of a row; rows need not start a line
  const int begin = static_cast<int>(blockIdx.x) * piece_of(p, keys), end = min(keys, begin + kLeastKeys);
  for (int i = threadIdx.x; i < kLeastKeys * kLines; i += kThreads) {
    const int key = begin + i / kLines;
    if (key >= end) break;
    const char* const at = from + key / kBlockTokens * p.queries.layout.block_stride() +
                           key % kBlockTokens * (D * 2) + i % kLines * kLine;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at + p.queries.layout.value_offset()));
  }
}

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(kThreads, blocks_at_once(D))
    attend_kernel(const __grid_constant__ Params p) {
  using W = Walk<T, D, kWide>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  __shared__ unsigned shared_ticket;
  const int query = blockIdx.z, part = blockIdx.x;
  const QueryToken token = p.queries.tokens[query];
  const int kv_head = p.lists_per_head == 1 ? blockIdx.y : blockIdx.y / p.lists_per_head;
  const int heads = p.lists_per_head == 1 ? p.group : 1, columns = heads * D / 4;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + blockIdx.y * heads;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  const char* const base = load_here(p.queries.bases + token.sequence) + p.queries.layer_offset +
                           kv_head * p.queries.layout.head_stride();
  if (!p.has_lists) prefetch_first<D>(p, base, token.position + 1);
  wait_for_predecessor();
  release_successor();
  typename W::RawQueries raw;
  W::ask_queries(p.queries.q + first_row * D, heads, raw);
  const int listed = p.has_lists ? p.lists.counts[list] : 0;
  const Keys keys(p, token.position, list, listed);
  const int piece = piece_of(p, keys.count), begin = part * piece;
  if (begin >= keys.count && part > 0) return;

  W walk(p, keys);
  const int warp = threadIdx.x / 32;
  walk.base = base;
  walk.end = min(keys.count, begin + piece);
  walk.first = begin + warp * kTile;
  walk.mine = max(0, (walk.end - walk.first + kWarps * kTile - 1) / (kWarps * kTile));
  walk.ring = shared_address(shared) + warp * kRing;
  unsigned ticket = 0;
  // Not atomicAdd, for which the compiler waits at once.
  if (keys.count > piece && threadIdx.x == 0)
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(ticket)
                 : "l"(p.tickets + list)
                 : "memory");
  walk.run(raw);

  const int parts = max(1, (keys.count + piece - 1) / piece);
  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  if (threadIdx.x == 0) shared_ticket = ticket;
  __syncthreads();
  const Posted posted = {p.posted + list * columns / 4 * p.most_parts * 6, p.most_parts};
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    const Record mine = merge_warps<D>(shared, kRing, heads, column);
    if (parts == 1)
      write_result<D>(p, first_row, column, mine);
    else
      posted.post(column, part, mine);
  }
  if (parts == 1) return;
  const int to_come = parts - 1 - static_cast<int>(shared_ticket);  // blocks that started later
  if (to_come >= min(p.most_mergers, parts)) return;
  if (to_come == 0 && threadIdx.x == 0) p.tickets[list] = 0;
  merge_posted<D>(p, posted, first_row, columns, parts, to_come);
}

/// Shared memory of a processor, in percent of the most there can be, so that just so many blocks fit: what
/// is left of it is cache, and all bytes under way to shared memory have a place there first.
int carveout_for(int shared, int blocks) {
  constexpr int kOfABlock = 1024 + 1024;  // what the system takes, and variables
  static const int most = [] {
    int device = 0, found = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&found, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    return found;
  }();
  return std::min(100, (blocks * (shared + kOfABlock) * 100 + most - 1) / most);
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  using W = Walk<T, D, kWide>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  const auto kernel = attend_kernel<T, D, kWide>;
  static const bool prepared = [=] {
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   carveout_for(kShared, blocks_at_once(D))));
    return true;
  }();
  static_cast<void>(prepared);
  const dim3 grid(static_cast<unsigned>(p.blocks),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                  static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, kShared, 1, stream)(kernel, p);
}

template <class T, bool kWide>
bool launch_for_dim(const Params& p, StreamHandle stream) {
  switch (p.queries.layout.head_dim) {
    case 64:
      return launch<T, 64, kWide>(p, stream), true;
    case 80:
      return launch<T, 80, kWide>(p, stream), true;
    case 96:
      return launch<T, 96, kWide>(p, stream), true;
    case 128:
      return launch<T, 128, kWide>(p, stream), true;
    case 256:
      return launch<T, 256, kWide>(p, stream), true;
    default:
      return false;
  }
}

template <class T>
bool launch_for(const Params& p, StreamHandle stream) {
  const bool wide = p.group > 8 && p.lists_per_head == 1;
  return wide ? launch_for_dim<T, true>(p, stream) : launch_for_dim<T, false>(p, stream);
}

/// How the keys of a list and the merging of their states are shared out.
void share_out(Params& p, std::int64_t max_tokens) {
  const int kv_heads = p.queries.layout.kv_heads;
  p.group = p.queries.query_heads / kv_heads;
  p.lists_per_head = p.has_lists ? p.lists.lists_per_head : 1;
  p.most_parts = parts_for(kv_heads, p.queries.layout.head_dim);
  p.reciprocal = static_cast<unsigned>(((std::int64_t{1} << 32) + p.most_parts - 1) / p.most_parts);
  if (p.most_parts == 1) p.reciprocal = ~0u;
  std::int64_t most_keys = max_tokens;
  if (p.has_lists) most_keys = std::min(max_tokens, p.lists.sink + p.lists.capacity + p.lists.window);
  const std::int64_t pieces = std::max<std::int64_t>(1, (most_keys + kLeastKeys - 1) / kLeastKeys);
  p.blocks = static_cast<int>(std::min<std::int64_t>(p.most_parts, pieces));
  const std::int64_t lists = std::int64_t{p.queries.count} * kv_heads * p.lists_per_head;
  p.most_mergers = static_cast<int>(1 + processors() / 2 / lists);
}

void attend(const Queries& queries, const RowLists* lists, std::int64_t max_tokens, void* workspace,
            StreamHandle stream) {
  if (queries.count == 0) return;
  Params p = {.queries = queries, .has_lists = lists != nullptr};
  if (lists != nullptr) p.lists = *lists;
  share_out(p, max_tokens);
  const std::int64_t tickets = std::int64_t{queries.count} * queries.query_heads;
  if (tickets > kTickets)
    throw RunError("expected at most " + std::to_string(kTickets) +
                   " query heads in one call of attention, found " + std::to_string(tickets));
  p.tickets = static_cast<unsigned*>(workspace);
  p.posted = reinterpret_cast<float4*>(static_cast<unsigned*>(workspace) + kTickets);
  if (p.group <= 16 && queries.layout.type == DType::bf16 && launch_for<__nv_bfloat16>(p, stream)) return;
  if (p.group <= 16 && queries.layout.type == DType::f16 && launch_for<__half>(p, stream)) return;
  attend_generic(queries, lists, stream);
}

}  // namespace

std::int64_t decode_workspace_bytes(int queries, int query_heads, int kv_heads, int head_dim) {
  // The tickets come first, in a region of fixed size: they stay zero whatever calls came before.
  const std::int64_t columns = std::int64_t{queries} * query_heads * ((head_dim + 3) / 4);
  return kTickets * 4 + columns * parts_for(kv_heads, head_dim) * std::int64_t{24};
}

void attend_full_decode(const Queries& queries, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream) {
  attend(queries, nullptr, max_tokens, workspace, stream);
}

void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t max_tokens,
                        void* workspace, StreamHandle stream) {
  attend(queries, &lists, max_tokens, workspace, stream);
}

}  // namespace lode::cuda
