// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (blocks that share a list, KV heads x lists, query tokens), kWarps warps a block. The keys
// of a list (sink, rows, window, in that order) are cut into pieces that depend on their number alone; a
// block owns one, its warps take tiles of 16 keys in turn (attend_walk.cuh). A block merges the states of its
// warps in shared memory. Where all keys of a list are few, its blocks are a cluster and send one another the
// columns that each merges; otherwise a block posts its state, and the blocks of the list that started last
// merge (attend_merge.cuh). Both give the same bits.
//
// The block that started last waits only for blocks that run already; those a few places before it may wait
// for some that have not started, but they are never more than half as many as there are processors, in all
// lists together, so that the others find room.
//
// Launched while the kernel in front still runs: where tokens and keys stand is looked up at once, everything
// else once that kernel has ended.
#include <algorithm>

#include "kernels/cuda/attend_generic.h"
#include "kernels/cuda/attend_merge.cuh"
#include "kernels/cuda/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kLeastKeys = kWarps * kTile;  // of a piece
constexpr int kFewKeys = 2048;              // for each KV head: no more are few
constexpr int kSlots = 264;                 // blocks at work at once on an H200, two a processor up to d 128
constexpr int kTickets = 1 << 16;

/// Blocks that share a list. Bits depend on the number of KV heads by this.
int parts_for(int kv_heads, int head_dim) {
  return std::max(1, (head_dim <= 128 ? kSlots : kSlots / 2) / kv_heads);
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
__device__ void merge_posted(const Params& p, const Posted& posted, std::int64_t first_row, int columns, int parts,
                             int to_come) {
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

/// The columns that this block of a cluster merges.
template <int D>
__device__ void merge_box(const Params& p, const Box& box, std::int64_t first_row, int columns, int parts) {
#if __CUDA_ARCH__ >= 900
  const int first = blockIdx.x * box.per, mine = min(box.per, columns - first);
  if (mine <= 0) return;
  if (threadIdx.x == 0) box.expect(parts * mine);
  box.wait();
  const int warp = threadIdx.x / 32, sub = threadIdx.x % 32 / 4;
  for (int from = warp * 4; from < mine; from += kThreads / kSubs) {
    const int column = from + threadIdx.x % 4;
    Record x[kClusterParts / kSubs];
#pragma unroll
    for (int i = 0; i < kClusterParts / kSubs; ++i) {
      if (sub + i * kSubs < parts && column < mine) x[i] = box.take(sub + i * kSubs, column);
    }
    const Record sum = fold(x);
    if (sub == 0 && column < mine) write_result<D>(p, first_row, first + column, sum);
  }
#endif
}

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// kCluster: the blocks of a list are a cluster.
template <class T, int D, bool kWide, bool kCluster>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ Params p) {
  using W = Walk<T, D, kWide>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  __shared__ unsigned shared_ticket;
  const int query = blockIdx.z;
  const QueryToken token = p.queries.tokens[query];
  const int kv_head = p.lists_per_head == 1 ? blockIdx.y : blockIdx.y / p.lists_per_head;
  const int heads = p.lists_per_head == 1 ? p.group : 1, columns = heads * D / 4;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + blockIdx.y * heads;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  const char* const base = load_here(p.queries.bases + token.sequence);
  const Box box = {shared_address(shared) + kWarps * kRing, Box::columns_of_a_block(columns)};
  if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) box.open();
#endif
    __syncwarp();
    cluster_arrive();
  }
  wait_for_predecessor();
  release_successor();
  typename W::RawQueries raw;
  W::ask_queries(p.queries.q + first_row * D, heads, raw);
  const int listed = p.has_lists ? p.lists.counts[list] : 0;
  const Keys keys(p, token.position, list, listed);

  // Pieces depend on the number of keys alone; at most `most` of them hold all keys.
  const bool few = keys.count <= p.few_keys;
  const unsigned even = __umulhi(static_cast<unsigned>(keys.count), p.reciprocal) + 1;
  const unsigned even_few = static_cast<unsigned>(keys.count + kClusterParts - 1) / kClusterParts;
  const int piece =
      max(kLeastKeys, static_cast<int>(((few || kCluster ? even_few : even) + kTile - 1) / kTile * kTile));
  // Few keys in a grid for many: half of the lists take other blocks, which are on other processors.
  const int shift = !kCluster && few && 2 * blockIdx.y >= gridDim.y && gridDim.x >= 2 * kClusterParts;
  const int part = static_cast<int>(blockIdx.x) - shift * kClusterParts;
  const int begin = part * piece;
  const bool idle = part < 0 || (begin >= keys.count && part > 0);
  if (!kCluster && idle) return;

  const int warp = threadIdx.x / 32, parts = max(1, (keys.count + piece - 1) / piece);
  unsigned ticket = 0;
  if (!idle) {
    W walk(p, keys);
    walk.base = base + p.queries.layer_offset + kv_head * p.queries.layout.head_stride();
    walk.end = min(keys.count, begin + piece);
    walk.first = begin + warp * kTile;
    walk.mine = max(0, (walk.end - walk.first + kWarps * kTile - 1) / (kWarps * kTile));
    walk.ring = shared_address(shared) + warp * kRing;
    // Not atomicAdd, for which the compiler waits at once.
    if (!kCluster && parts > 1 && threadIdx.x == 0)
      asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(ticket)
                   : "l"(p.tickets + list)
                   : "memory");
    walk.run(raw);
    walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  }
  if (threadIdx.x == 0) shared_ticket = ticket;
  __syncthreads();
  if constexpr (kCluster) cluster_wait();
  const Posted posted = {p.posted + list * columns / 4 * p.stride * 6, p.stride};
  for (int column = threadIdx.x; column < columns && !idle; column += kThreads) {
    const Record mine = merge_warps<D>(shared, kRing, heads, column);
    if constexpr (kCluster) {
#if __CUDA_ARCH__ >= 900
      box.send(column, part, mine);
#endif
    } else if (parts == 1) {
      write_result<D>(p, first_row, column, mine);
    } else {
      posted.post(column, part, mine);
    }
  }
  if constexpr (kCluster) return merge_box<D>(p, box, first_row, columns, parts);
  if (parts == 1) return;
  const int to_come = parts - 1 - static_cast<int>(shared_ticket);  // blocks that started later
  if (to_come >= min(p.most_mergers, parts)) return;
  if (to_come == 0 && threadIdx.x == 0) p.tickets[list] = 0;
  merge_posted<D>(p, posted, first_row, columns, parts, to_come);
}

template <class Kernel>
void prepare(Kernel kernel, int shared, bool clusters) {
  LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  // One split of shared memory and cache for all, so that a block can follow another kernel's without a wait.
  LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared));
  if (clusters) LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  using W = Walk<T, D, kWide>;
  constexpr int kRings = kWarps * W::kStages * W::kStageBytes;
  constexpr int kWithBox = kRings + Box::bytes((kWide ? 16 : 8) * D / 4);
  const auto apart = attend_kernel<T, D, kWide, false>, together = attend_kernel<T, D, kWide, true>;
  const unsigned kv_lists = static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                 queries = static_cast<unsigned>(p.queries.count);
  const EarlyLaunch in_clusters({kClusterParts, kv_lists, queries}, kThreads, kWithBox, kClusterParts, stream);
  static const int at_once = [&] {
    prepare(apart, kRings, false);
    if (!has_clusters()) return 0;
    prepare(together, kWithBox, true);
    return in_clusters.clusters_at_once(together);
  }();
  const int lists = static_cast<int>(kv_lists * queries);
  if (p.most_keys <= p.few_keys && at_once > 0 && (lists <= at_once || lists >= 4 * at_once))
    return in_clusters(together, p);
  EarlyLaunch({static_cast<unsigned>(p.blocks), kv_lists, queries}, kThreads, kRings, 1, stream)(apart, p);
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
  const int most_parts = parts_for(kv_heads, p.queries.layout.head_dim);
  p.reciprocal = static_cast<unsigned>(((std::int64_t{1} << 32) + most_parts - 1) / most_parts);
  if (most_parts == 1) p.reciprocal = ~0u;
  p.stride = most_parts;
  p.few_keys = most_parts >= 2 * kClusterParts ? kFewKeys * kv_heads : 0;
  p.most_keys = max_tokens;
  if (p.has_lists) p.most_keys = std::min(max_tokens, p.lists.sink + p.lists.capacity + p.lists.window);
  const std::int64_t pieces = std::max<std::int64_t>((p.most_keys + kLeastKeys - 1) / kLeastKeys, 2 * kClusterParts);
  p.blocks = static_cast<int>(std::min<std::int64_t>(most_parts, pieces));
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
