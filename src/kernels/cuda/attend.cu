// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (parts x blocks of a cluster, KV heads x lists, query tokens), kWarps warps a block. The
// keys of a list (sink, rows, window, in that order) are cut into pieces that depend on their number alone; a
// block owns one, its warps take tiles of 16 keys in turn (attend_walk.cuh). The states of all warps of a
// cluster are merged through distributed shared memory, each block merging its columns of the output. Where a
// list has several clusters, they post their merged states in global memory and the cluster that started last
// merges these: those that it waits for have started, so it never waits for one without a place. A posted
// number is never +0 (-0 stands for it), and the reader puts +0 back, so that a place says by itself whether
// its number has come; that costs neither fences nor a second trip. The order of merging is fixed.
#include <algorithm>

#include "kernels/cuda/attend_generic.h"
#include "kernels/cuda/attend_walk.cuh"
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/select_cluster.cuh"

namespace lode::cuda {

namespace {

constexpr int kLeastKeys = 64;  // of a piece
constexpr int kAhead = 4;
constexpr int kTickets = 1 << 16;

/// How the keys of one query are shared out. With few KV heads a list has many pieces, and large clusters
/// leave few states to post; with more of them small clusters fill the processors better (of an H200, 30
/// clusters of eight are at work at once, or 132 of two). Bits depend on the number of KV heads by this.
struct Cut {
  int together = 1, parts = 1;  ///< blocks of a cluster; clusters that share a list
};
Cut cut_for(int kv_heads) {
  if (!has_clusters()) return {1, std::clamp(216 / kv_heads, 1, 64)};
  if (kv_heads <= 2) return {8, 30 / kv_heads};
  return {2, std::max(1, 132 / kv_heads)};
}
/// Floats that one part posts: o [heads][D], then for each block of the cluster m and l [heads][2]; whole
/// float4.
__host__ __device__ constexpr std::int64_t posted_floats(int heads, int head_dim, int together) {
  return (std::int64_t{heads} * (head_dim + 2 * together) + 3) / 4 * 4;
}

/// States in the shared memory of a cluster's blocks, one a warp.
template <int D, int C>
struct Held {
  const char* rings;
  int ring_bytes, heads;

  __device__ const float* state(int s) const {
    return reinterpret_cast<const float*>(
        Together<C>::of(const_cast<char*>(rings) + s % kWarps * ring_bytes, s / kWarps));
  }
  __device__ float4 ask(int s, int column) const {
    return *reinterpret_cast<const float4*>(state(s) + column * 4);
  }
  __device__ void settle(int, int, float4&) const {}
  __device__ float2 peak_and_sum(int s, int head) const {
    return *reinterpret_cast<const float2*>(state(s) + heads * D + head * 2);
  }
};

/// States that parts posted; reading waits for them and clears their places.
template <int D, int C>
struct Posted {
  float* first;
  int heads, rank;

  __device__ float* state(int s) const { return first + s * posted_floats(heads, D, C); }
  __device__ float* peak_place(int s, int head) const {
    return state(s) + heads * D + (rank * heads + head) * 2;
  }
  /// What is there now; several may be under way.
  __device__ float4 ask(int s, int column) const {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(state(s) + column * 4)
                 : "memory");
    return x;
  }
  /// Asks until all has come, and clears the place.
  __device__ void settle(int s, int column, float4& x) const {
    while (empty(x.x) || empty(x.y) || empty(x.z) || empty(x.w)) x = ask(s, column);
    *reinterpret_cast<float4*>(state(s) + column * 4) = {};
  }
  __device__ float2 peak_and_sum(int s, int head) const {
    float* const at = peak_place(s, head);
    float2 x;
    do {
      asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                   : "=f"(x.x), "=f"(x.y)
                   : "l"(at)
                   : "memory");
    } while (empty(x.x) || empty(x.y));
    *reinterpret_cast<float2*>(at) = {};
    return x;
  }
  __device__ void post_output(int s, int column, const float4& x) const {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(state(s) + column * 4),
                 "f"(full(x.x)), "f"(full(x.y)), "f"(full(x.z)), "f"(full(x.w))
                 : "memory");
  }
  __device__ void post_peak(int s, int head, float m, float l) const {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(peak_place(s, head)), "f"(full(m)),
                 "f"(full(l))
                 : "memory");
  }
  static __device__ bool empty(float x) { return __float_as_uint(x) == 0; }
  static __device__ float full(float x) { return x == 0.0f ? -0.0f : x; }
};

/// Shared memory of a merge.
struct Scratch {
  float2* factors;  // [heads][count]: m, then the factor of the state; l
  float* peaks;     // [heads]
  float* sums;      // [heads]
};
template <int C>
constexpr int kMostStates = C == 2   ? 44
                            : C == 1 ? 64
                                     : 32;
template <int C>
constexpr int kScratchBytes = 16 * (kMostStates<C> * 8 + 8);

/// Peak and sum of each head over `count` states, and the factor of each.
template <class States>
__device__ void weigh(const States& from, int count, int heads, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = warp; head < heads; head += kWarps) {
    float2* const of_head = scratch.factors + head * count;
    float peak = -INFINITY, sum = 0.0f;
    for (int s = lane; s < count; s += 32) {
      const float2 ml = from.peak_and_sum(s, head);
      of_head[s] = ml;
      peak = fmaxf(peak, ml.x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
    for (int s = lane; s < count; s += 32) {
      const float keep = decay(of_head[s].x, peak);
      of_head[s].x = keep;
      sum += keep * of_head[s].y;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) scratch.peaks[head] = peak, scratch.sums[head] = sum;
  }
}

/// Merges the columns [first, last) of `count` states; put(column, sum) takes what came out, unnormalised. A
/// column is four numbers; kLanesPerColumn lanes share one. All threads of the block take part.
template <int D, int kLanesPerColumn, class States, class Put>
__device__ void merge(const States& from, int count, int heads, int first, int last, const Scratch& scratch,
                      Put put) {
  const int sub = threadIdx.x % kLanesPerColumn;
  const auto load = [&](int column, int s0, float4(&x)[kAhead]) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int s = s0 + sub + i * kLanesPerColumn;
      x[i] = s < count && column < last ? from.ask(s, column) : float4{};
    }
  };
  float4 x[kAhead];
  int column = first + threadIdx.x / kLanesPerColumn;
  load(column, 0, x);  // under way while the states are weighed
  weigh(from, count, heads, scratch);
  __syncthreads();
  for (int at = first; at < last; at += kThreads / kLanesPerColumn, column += kThreads / kLanesPerColumn) {
    const float2* const factors = scratch.factors + min(column, last - 1) * 4 / D * count;
    float4 sum = {};
    for (int s0 = 0; s0 < count; s0 += kAhead * kLanesPerColumn) {
      if (at != first || s0 != 0) load(column, s0, x);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int s = s0 + sub + i * kLanesPerColumn;
        const float f = s < count ? factors[s].x : 0.0f;
        if (s < count && column < last) from.settle(s, column, x[i]);
        sum.x += f * x[i].x, sum.y += f * x[i].y, sum.z += f * x[i].z, sum.w += f * x[i].w;
      }
    }
#pragma unroll
    for (int offset = 1; offset < kLanesPerColumn; offset *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, offset);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, offset);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, offset);
      sum.w += __shfl_xor_sync(0xffffffffu, sum.w, offset);
    }
    if (sub == 0 && column < last) put(column, sum);
  }
}

/// Four merged numbers to their place: normalised, the tail merged last.
template <int D>
__device__ void write_result(const Params& p, const Scratch& scratch, std::int64_t first_row, int column,
                             const float4& sum) {
  const int head = column * 4 / D, at = column * 4 % D;
  const std::int64_t row = first_row + head;
  const float m = scratch.peaks[head], l = scratch.sums[head];
  float lse = l == 0.0f ? -INFINITY : (m == -INFINITY ? 0.0f : m) * kLn2 + logf(l);
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  float4 x = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
  if (p.lists.tail_lse != nullptr && p.lists.tail_lse[row] != -INFINITY) {
    const float tail = p.lists.tail_lse[row], peak = fmaxf(lse, tail);
    const float mine = lse == -INFINITY ? 0.0f : expf(lse - peak), theirs = expf(tail - peak);
    const float keep = mine / (mine + theirs), add = theirs / (mine + theirs);
    const float4 y = *reinterpret_cast<const float4*>(p.lists.tail_output + row * D + at);
    x = {x.x * keep + y.x * add, x.y * keep + y.y * add, x.z * keep + y.z * add, x.w * keep + y.w * add};
    lse = peak + logf(mine + theirs);
  }
  *reinterpret_cast<float4*>(p.queries.o + row * D + at) = x;
  if (p.queries.lse != nullptr && at == 0) p.queries.lse[row] = lse;
}

/// Where the scratch lies: behind the first warp's state in its ring. Shared memory must not grow by it,
/// since L1 is what is left, and copies through a smaller L1 come at half the rate.
template <class T, int D, bool kWide, int C>
constexpr int scratch_offset() {
  using W = Walk<T, D, kWide>;
  constexpr int kRing = W::kStages * W::kStageBytes, kState = (kWide ? 16 : 8) * (D + 2) * 4;
  static_assert(kRing >= kState);
  return kRing - kState >= kScratchBytes<C> ? kState : kWarps * kRing;
}
template <class T, int D, bool kWide, int C>
constexpr int shared_bytes() {
  using W = Walk<T, D, kWide>;
  constexpr int kRings = kWarps * W::kStages * W::kStageBytes, kScratch = scratch_offset<T, D, kWide, C>();
  return kScratch < kRings ? kRings : kRings + kScratchBytes<C>;
}

template <class T, int D, bool kWide, int C>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ < 900
  if constexpr (C > 1) return;  // never launched there
#endif
  using W = Walk<T, D, kWide>;
  using All = Together<C>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  extern __shared__ __align__(16) char shared[];
  __shared__ bool started_last;
  const int kv_heads = p.queries.layout.kv_heads, group = p.queries.query_heads / kv_heads;
  const int per_head = p.has_lists ? p.lists.lists_per_head : 1;
  const int query = blockIdx.z, kv_head = blockIdx.y / per_head;
  const int heads = per_head > 1 ? 1 : group;
  const std::int64_t first_row =
      std::int64_t{query} * p.queries.query_heads + kv_head * group + blockIdx.y % per_head;
  const QueryToken token = p.queries.tokens[query];
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  const Keys keys(p, token.position, list);

  // Pieces depend on the number of keys alone.
  const int wanted = max(1, min(p.most_parts * C, (keys.count + kLeastKeys - 1) / kLeastKeys));
  const int piece = ((keys.count + wanted - 1) / wanted + kTile - 1) / kTile * kTile;
  const int pieces = keys.count == 0 ? 1 : (keys.count + piece - 1) / piece;
  const int parts = (pieces + C - 1) / C, part = blockIdx.x / C, rank = All::rank();
  if (part >= parts) return;

  W walk(p, keys);
  const int warp = threadIdx.x / 32, begin = min(keys.count, (part * C + rank) * piece);
  walk.base =
      p.queries.bases[token.sequence] + p.queries.layer_offset + kv_head * p.queries.layout.head_stride();
  walk.end = min(keys.count, begin + piece);
  walk.first = begin + warp * kTile;
  walk.mine = max(0, (walk.end - walk.first + kWarps * kTile - 1) / (kWarps * kTile));
  walk.ring = shared_address(shared) + warp * kRing;
  walk.begin();
  unsigned ticket = 0;
  if (parts > 1 && rank == 0 && threadIdx.x == 0) ticket = atomicAdd(p.tickets + list, 1u);
  walk.load_queries(p.queries.q + first_row * D, heads);
  walk.run();

  float* const scratch_at = reinterpret_cast<float*>(shared + scratch_offset<T, D, kWide, C>());
  const Scratch scratch = {reinterpret_cast<float2*>(scratch_at + 32), scratch_at, scratch_at + 16};
  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  if (rank == 0 && threadIdx.x == 0) {
    started_last = parts > 1 && static_cast<int>(ticket) == parts - 1;
    if (started_last) p.tickets[list] = 0;
  }
  All::sync();
  const int columns = heads * D / 4, share = (columns + C - 1) / C;
  const int first = min(columns, rank * share), last = min(columns, first + share);
  const bool merges = *All::of(&started_last, 0);
  const auto finish = [&](int column, const float4& sum) {
    write_result<D>(p, scratch, first_row, column, sum);
  };
  constexpr int kLanes = C == 8 ? 8 : 4;  // enough to ask for the states of all parts at once
  const Held<D, C> held = {shared, kRing, heads};
  if (parts == 1) {
    merge<D, kLanes>(held, kWarps * C, heads, first, last, scratch, finish);
    return All::sync();  // the others read this block's states until here
  }
  const Posted<D, C> posted = {p.posted + list * p.most_parts * posted_floats(heads, D, C), heads, rank};
  merge<D, kLanes>(held, kWarps * C, heads, first, last, scratch,
                   [&](int column, const float4& sum) { posted.post_output(part, column, sum); });
  // Every block posts its own copy for the block of its rank; it has weighed every head.
  if (threadIdx.x < heads)
    posted.post_peak(part, threadIdx.x, scratch.peaks[threadIdx.x], scratch.sums[threadIdx.x]);
  All::sync();
  if (merges) merge<D, kLanes>(posted, parts, heads, first, last, scratch, finish);
}

template <class T, int D, bool kWide, int C>
void launch_together_as(const Params& p, StreamHandle stream) {
  constexpr int kShared = shared_bytes<T, D, kWide, C>();
  static const bool raised = [] {
    LODE_CUDA(cudaFuncSetAttribute(attend_kernel<T, D, kWide, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kShared));
    return true;
  }();
  static_cast<void>(raised);
  const int lists = p.queries.layout.kv_heads * (p.has_lists ? p.lists.lists_per_head : 1);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.most_parts * C), static_cast<unsigned>(lists),
                        static_cast<unsigned>(p.queries.count));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {C, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = C > 1 ? 1 : 0;
  LODE_CUDA(cudaLaunchKernelEx(&config, attend_kernel<T, D, kWide, C>, p));
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  switch (cut_for(p.queries.layout.kv_heads).together) {
    case 8:
      return launch_together_as<T, D, kWide, 8>(p, stream);
    case 2:
      return launch_together_as<T, D, kWide, 2>(p, stream);
    default:
      return launch_together_as<T, D, kWide, 1>(p, stream);
  }
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
  const bool wide =
      p.queries.query_heads / p.queries.layout.kv_heads > 8 && (!p.has_lists || p.lists.lists_per_head == 1);
  return wide ? launch_for_dim<T, true>(p, stream) : launch_for_dim<T, false>(p, stream);
}

void attend(const Queries& queries, const RowLists* lists, void* workspace, StreamHandle stream) {
  if (queries.count == 0) return;
  Params p = {.queries = queries,
              .has_lists = lists != nullptr,
              .most_parts = cut_for(queries.layout.kv_heads).parts};
  if (lists != nullptr) p.lists = *lists;
  const std::int64_t tickets = std::int64_t{queries.count} * queries.query_heads;
  if (tickets > kTickets)
    throw RunError("expected at most " + std::to_string(kTickets) +
                   " query heads in one call of attention, found " + std::to_string(tickets));
  p.tickets = static_cast<unsigned*>(workspace);
  p.posted = static_cast<float*>(workspace) + kTickets;
  const bool fits = queries.query_heads / queries.layout.kv_heads <= 16;
  if (fits && queries.layout.type == DType::bf16 && launch_for<__nv_bfloat16>(p, stream)) return;
  if (fits && queries.layout.type == DType::f16 && launch_for<__half>(p, stream)) return;
  attend_generic(queries, lists, stream);
}

}  // namespace

std::int64_t decode_workspace_bytes(int queries, int query_heads, int head_dim, std::int64_t) {
  // The tickets come first, in a region of fixed size: they stay zero whatever calls came before.
  std::int64_t most = 0;
  for (int kv_heads = 1; kv_heads <= query_heads; ++kv_heads) {
    const Cut cut = cut_for(kv_heads);
    most = std::max(most, cut.parts * posted_floats(1, head_dim, cut.together));
  }
  return (kTickets + std::int64_t{queries} * query_heads * most) * 4;
}

void attend_full_decode(const Queries& queries, std::int64_t, void* workspace, StreamHandle stream) {
  attend(queries, nullptr, workspace, stream);
}

void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t, void* workspace,
                        StreamHandle stream) {
  attend(queries, &lists, workspace, stream);
}

}  // namespace lode::cuda
