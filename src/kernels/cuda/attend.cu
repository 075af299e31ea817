// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (blocks that share a list, KV heads x lists, query tokens), kWarps warps a block. The keys
// of a list (sink, rows, window, in that order) are cut into pieces that depend on their number alone; a
// block owns one, its warps take tiles of 16 keys in turn (attend_walk.cuh). A block merges the states of its
// warps in shared memory and posts a record for every four columns of its output; the blocks of
// the list that started last merge the records, column by column. The order of merging is fixed.
//
// A posted number is never +0 (-0 stands for it), and the reader puts +0 back, so that a place says by itself
// whether its number has come: neither fences nor flags, one trip through the second-level cache. The block
// that started last waits only for blocks that run already; those a few places before it may wait for some
// that have not started, but they are never more than half as many as there are processors, in all lists
// together, so that the others find room.
#include <algorithm>

#include "kernels/cuda/attend_generic.h"
#include "kernels/cuda/attend_walk.cuh"
#include "kernels/cuda/check.cuh"

namespace lode::cuda {

namespace {

constexpr int kLeastKeys = kWarps * kTile;  // of a piece
constexpr int kAhead = 9;                   // records that a lane asks for at once
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

/// Unnormalised sums of four columns, with the peak and sum of their head.
struct Record {
  float4 o = {};
  float m = -INFINITY, l = 0.0f;
};

__device__ bool empty(float x) {
  return __float_as_uint(x) == 0;
}
__device__ float full(float x) {
  return x == 0.0f ? -0.0f : x;
}

/// Places for the records of one list, those of a column beside one another.
struct Posted {
  float4* o;   // [columns, stride]
  float2* ml;  // [columns, stride]: the column's head's m and l
  int stride;

  __device__ void post(int column, int part, const Record& x) const {
    const std::int64_t at = std::int64_t{column} * stride + part;
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(o + at), "f"(full(x.o.x)),
                 "f"(full(x.o.y)), "f"(full(x.o.z)), "f"(full(x.o.w))
                 : "memory");
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(ml + at), "f"(full(x.m)), "f"(full(x.l))
                 : "memory");
  }
  /// What is there now, where it is wanted; several may be under way.
  __device__ void ask(std::int64_t at, bool wanted, Record& x) const {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.s32 wanted, %8, 0;\n"
        "@wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%6];\n"
        "@wanted ld.relaxed.gpu.global.v2.f32 {%4, %5}, [%7];\n"
        "}"
        : "+f"(x.o.x), "+f"(x.o.y), "+f"(x.o.z), "+f"(x.o.w), "+f"(x.m), "+f"(x.l)
        : "l"(o + at), "l"(ml + at), "r"(static_cast<int>(wanted))
        : "memory");
  }
  /// Waits until something is there, asking for little so as not to be in the way of those waited for.
  __device__ void wait(std::int64_t at) const {
    float2 x;
    do {
      asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                   : "=f"(x.x), "=f"(x.y)
                   : "l"(ml + at)
                   : "memory");
    } while (empty(x.y));
  }
  __device__ void clear(std::int64_t at) const { o[at] = {}, ml[at] = {}; }
};
__device__ bool has_come(const Record& x) {
  return !(empty(x.o.x) || empty(x.o.y) || empty(x.o.z) || empty(x.o.w) || empty(x.m) || empty(x.l));
}

__device__ void add(Record& to, const Record& x, float factor) {
  to.o.x += factor * x.o.x, to.o.y += factor * x.o.y, to.o.z += factor * x.o.z, to.o.w += factor * x.o.w;
  to.l += factor * x.l;
}
/// Several records together.
template <int kCount>
__device__ Record together(const Record (&x)[kCount], float peak) {
  Record sum;
  sum.m = peak;
#pragma unroll
  for (int i = 0; i < kCount; ++i) add(sum, x[i], decay(x[i].m, peak));
  return sum;
}
template <int kCount>
__device__ float peak_of(const Record (&x)[kCount]) {
  float peak = x[0].m;
#pragma unroll
  for (int i = 1; i < kCount; ++i) peak = fmaxf(peak, x[i].m);
  return peak;
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

/// The records of all parts for four columns, shared out over the `sharers` lanes beside one another.
__device__ Record merge_posted(const Posted& posted, int column, int parts, int sharers) {
  const int sub = threadIdx.x % sharers, mine = sub < parts ? (parts - sub + sharers - 1) / sharers : 0;
  const std::int64_t first = std::int64_t{column} * posted.stride + sub;
  Record x[kAhead];
  unsigned missing = (1u << mine) - 1;
  while (true) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) posted.ask(first + i * sharers, (missing >> i & 1) != 0, x[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (has_come(x[i])) missing &= ~(1u << i);
    if (missing == 0) break;
    posted.wait(first + (31 - __clz(missing)) * sharers);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < mine) posted.clear(first + i * sharers);
  float peak = peak_of(x);
  for (int offset = 1; offset < sharers; offset *= 2)
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
  Record sum = together(x, peak);
  for (int offset = 1; offset < sharers; offset *= 2) {
    sum.o.x += __shfl_xor_sync(0xffffffffu, sum.o.x, offset);
    sum.o.y += __shfl_xor_sync(0xffffffffu, sum.o.y, offset);
    sum.o.z += __shfl_xor_sync(0xffffffffu, sum.o.z, offset);
    sum.o.w += __shfl_xor_sync(0xffffffffu, sum.o.w, offset);
    sum.l += __shfl_xor_sync(0xffffffffu, sum.l, offset);
  }
  return sum;
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

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ Params p) {
  using W = Walk<T, D, kWide>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  __shared__ unsigned shared_ticket;
  const int query = blockIdx.z, part = blockIdx.x;
  const QueryToken token = p.queries.tokens[query];
  const int kv_head = p.lists_per_head == 1 ? blockIdx.y : blockIdx.y / p.lists_per_head;
  const int heads = p.lists_per_head == 1 ? p.group : 1;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + blockIdx.y * heads;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  typename W::RawQueries raw;
  W::ask_queries(p.queries.q + first_row * D, heads, raw);
  const int listed = p.has_lists ? p.lists.counts[list] : 0;
  const char* const base = load_here(p.queries.bases + token.sequence);
  const Keys keys(p, token.position, list, listed);

  // Pieces depend on the number of keys alone; at most most_parts of them hold all keys.
  const unsigned even = __umulhi(static_cast<unsigned>(keys.count), p.reciprocal) + 1;
  const int piece = max(kLeastKeys, static_cast<int>((even + kTile - 1) / kTile * kTile));
  const int begin = part * piece;
  if (begin >= keys.count && part > 0) return;

  W walk(p, keys);
  const int warp = threadIdx.x / 32;
  walk.base = base + p.queries.layer_offset + kv_head * p.queries.layout.head_stride();
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
  const int columns = heads * D / 4, stride = (p.most_parts + 7) / 8 * 8;
  float4* const places = p.posted + list * columns * stride * 3 / 2;
  const Posted posted = {places, reinterpret_cast<float2*>(places + columns * stride), stride};
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    const Record mine = merge_warps<D>(shared, kRing, heads, column);
    if (parts == 1)
      write_result<D>(p, first_row, column, mine);
    else
      posted.post(column, part, mine);
  }
  if (parts == 1) return;
  const int to_come = parts - 1 - static_cast<int>(shared_ticket);  // blocks that started later
  const int mergers = min(p.most_mergers, parts);
  if (to_come >= mergers) return;
  if (to_come == 0 && threadIdx.x == 0) p.tickets[list] = 0;
  const int at_once = kThreads / p.sharers;
  for (int from = to_come * at_once; from < columns; from += mergers * at_once) {
    const int column = from + threadIdx.x / p.sharers;
    const bool real = column < columns;
    const Record sum = merge_posted(posted, real ? column : 0, real ? parts : 0, p.sharers);
    if (real && threadIdx.x % p.sharers == 0) write_result<D>(p, first_row, column, sum);
  }
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  using W = Walk<T, D, kWide>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  static const bool raised = [] {
    LODE_CUDA(cudaFuncSetAttribute(attend_kernel<T, D, kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kShared));
    return true;
  }();
  static_cast<void>(raised);
  const dim3 grid(static_cast<unsigned>(p.most_parts),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                  static_cast<unsigned>(p.queries.count));
  attend_kernel<T, D, kWide><<<grid, kThreads, kShared, stream>>>(p);
  LODE_LAUNCHED();
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
void share_out(Params& p) {
  const int kv_heads = p.queries.layout.kv_heads;
  p.group = p.queries.query_heads / kv_heads;
  p.lists_per_head = p.has_lists ? p.lists.lists_per_head : 1;
  p.most_parts = parts_for(kv_heads, p.queries.layout.head_dim);
  p.reciprocal = static_cast<unsigned>(((std::int64_t{1} << 32) + p.most_parts - 1) / p.most_parts);
  if (p.most_parts == 1) p.reciprocal = ~0u;
  p.sharers = 8;
  while (p.sharers * kAhead < p.most_parts) p.sharers *= 2;
  const std::int64_t lists = std::int64_t{p.queries.count} * kv_heads * p.lists_per_head;
  p.most_mergers = static_cast<int>(1 + processors() / 2 / lists);
}

void attend(const Queries& queries, const RowLists* lists, void* workspace, StreamHandle stream) {
  if (queries.count == 0) return;
  Params p = {.queries = queries, .has_lists = lists != nullptr};
  if (lists != nullptr) p.lists = *lists;
  share_out(p);
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
  return kTickets * 4 + columns * ((parts_for(kv_heads, head_dim) + 7) / 8 * 8) * std::int64_t{24};
}

void attend_full_decode(const Queries& queries, std::int64_t, void* workspace, StreamHandle stream) {
  attend(queries, nullptr, workspace, stream);
}

void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t, void* workspace,
                        StreamHandle stream) {
  attend(queries, &lists, workspace, stream);
}

}  // namespace lode::cuda
