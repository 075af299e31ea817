// SPDX-License-Identifier: Apache-2.0
// Work map: a block of 128 threads for a key. Its candidates' rows lie in shared memory, one thread each measures its
// distance; the nearest one is kept, all threads see whether it occludes theirs, and so on.
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ordered.cuh"
#include "kernels/cuda/graph/links.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = kMostCandidates;
constexpr int kPad = 4;  // floats behind a row: rows of eight threads then lie in different banks
constexpr int kCounterRoom = 4096, kMostListed = kListsPerKey * kMostOfList;
static_assert(2 * kMostListed <= kCounterRoom);

using Order = std::uint64_t;  // [order of a number | who]

/// What a block knows of its candidates. Rows follow in dynamic shared memory.
struct Candidates {
  int ids[kMostCandidates];
  Order order[kMostCandidates];  // of distances
  int place[kMostCandidates];    // by rank: which candidate
  float squares[kMostCandidates];
  bool occluded[kMostCandidates];  // by rank
  int count, kept;
  int kept_ids[kMostCandidates];
};

__device__ __forceinline__ float dot(const float* a, const float* b, int width) {
  float sum = 0.0f;
  int j = 0;
  for (; j + 4 <= width; j += 4) {
    const float4 x = *reinterpret_cast<const float4*>(a + j), y = *reinterpret_cast<const float4*>(b + j);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
  }
  for (; j < width; ++j) sum = fmaf(a[j], b[j], sum);
  return sum;
}

/// Of rows of global memory, whose width may divide no 16 bytes.
__device__ __forceinline__ float dot_anywhere(const float* a, const float* b, int width) {
  if (width % 4 == 0) return dot(a, b, width);
  float sum = 0.0f;
  for (int j = 0; j < width; ++j) sum = fmaf(a[j], b[j], sum);
  return sum;
}

__device__ __forceinline__ float distance(float square_a, float square_b, float product) {
  const float d = square_a + square_b - 2.0f * product;
  return d != d ? INFINITY : d;
}

/// Row strides in shared memory.
__host__ __device__ constexpr int stride_of(int width) {
  return (width + 3) / 4 * 4 + kPad;
}

__device__ void load_row(const float* from, int width, float* to) {
  for (int j = static_cast<int>(threadIdx.x) % 32; j < width; j += 32) to[j] = from[j];
}

/// Where an order stands among `count` different ones.
__device__ __forceinline__ int rank_of(Order own, const Order* all, int count) {
  int rank = 0;
  for (int i = 0; i < count; ++i) rank += all[i] < own ? 1 : 0;
  return rank;
}

/// c.kept_ids, c.kept = what of c.ids [c.count] is kept, nearest first: those that no kept one lies nearer to than the
/// node does, at most `most`; then, where `fill`, the nearest of the others. All threads call it.
__device__ void prune(Candidates& c, float* rows, const LinkedKeys& keys, std::int64_t node, int most,
                      bool fill) {
  const int thread = static_cast<int>(threadIdx.x), stride = stride_of(keys.width), count = c.count;
  float* const own = rows + kMostCandidates * stride;
  for (int i = thread / 32; i < count; i += kThreads / 32)
    load_row(keys.rows + std::int64_t{c.ids[i]} * keys.width, keys.width, rows + i * stride);
  if (thread < 32) load_row(keys.rows + node * keys.width, keys.width, own);
  if (thread == 0) c.kept = 0;
  __syncthreads();
  float far = 0.0f;
  if (thread < count) {
    c.squares[thread] = keys.squares[c.ids[thread]];
    far = distance(keys.squares[node], c.squares[thread], dot(own, rows + thread * stride, keys.width));
    c.order[thread] = Order{ordered(far)} << 32 | static_cast<unsigned>(c.ids[thread]);
  }
  __syncthreads();
  int rank = -1;
  if (thread < count) {
    rank = rank_of(c.order[thread], c.order, count);
    c.place[rank] = thread;
    c.occluded[rank] = false;
  }
  __syncthreads();
  int kept = 0;
  for (int i = 0; i < count && kept < most; ++i) {
    if (c.occluded[i]) continue;
    const int by = c.place[i];
    if (thread == 0) c.kept_ids[kept] = c.ids[by];
    ++kept;
    if (rank > i && !c.occluded[rank] &&
        c.squares[by] + c.squares[thread] -
                2.0f * dot(rows + by * stride, rows + thread * stride, keys.width) <
            far)
      c.occluded[rank] = true;
    __syncthreads();
  }
  if (thread == 0) {
    for (int i = 0; fill && i < count && kept < most; ++i)
      if (c.occluded[i]) c.kept_ids[kept++] = c.ids[c.place[i]];
    c.kept = kept;
  }
  __syncthreads();
}

__device__ void write_links(const Candidates& c, int width, std::int32_t* row) {
  if (const int i = static_cast<int>(threadIdx.x); i < width) row[i] = i < c.kept ? c.kept_ids[i] : -1;
}

/// Of a stream of different orders the least `most` <= kThreads, in order.
struct Least {
  Order kept[2][kThreads], fresh[kThreads];
  int count, now;
};

/// All threads call it, with ~0 where they have none.
__device__ void take_least(Least& l, Order own, int most) {
  const int thread = static_cast<int>(threadIdx.x);
  l.fresh[thread] = own;
  __syncthreads();
  const Order* const old = l.kept[l.now];
  Order* const to = l.kept[l.now ^ 1];
  const int count = l.count;
  if (own != ~Order{0}) {
    const int at = rank_of(own, old, count) + rank_of(own, l.fresh, kThreads);
    if (at < most) to[at] = own;
  }
  if (thread < count) {
    const int at = thread + rank_of(old[thread], l.fresh, kThreads);
    if (at < most) to[at] = old[thread];
  }
  const int fresh = __syncthreads_count(own != ~Order{0} ? 1 : 0);
  if (thread == 0) l.count = min(most, count + fresh), l.now ^= 1;
  __syncthreads();
}

/// How often keys stand in some lists.
struct Counters {
  int ids[kCounterRoom], counts[kCounterRoom];
  int of_count[kListsPerKey + 1];  // keys that stand there so often
};

__device__ __forceinline__ void count(Counters& c, int key) {
  unsigned at = (static_cast<unsigned>(key) * 2654435761u >> 8) % kCounterRoom;
  for (;; at = (at + 1) % kCounterRoom) {
    const int before = atomicCAS(c.ids + at, -1, key);
    if (before == -1 || before == key) break;
  }
  atomicAdd(c.counts + at, 1);
}

/// The keys that were counted most often, of equal ones the earlier, at most `most`: to `to`.
__device__ void take_most_counted(const Counters& c, int most, Candidates& to) {
  const int thread = static_cast<int>(threadIdx.x);
  int least = kListsPerKey, above = 0;  // keys counted more often than `least`
  while (least > 1 && above + c.of_count[least] < most) above += c.of_count[least--];
  const int wanted = most - above;  // of those counted `least` times
  unsigned below = ~0u;             // keys up to here are taken
  if (c.of_count[least] > wanted) {
    unsigned low = 0, high = 0x7fffffffu;
    while (low < high) {
      const unsigned middle = low + (high - low) / 2;
      int own = 0;
      for (int i = thread; i < kCounterRoom; i += kThreads)
        own += c.counts[i] == least && static_cast<unsigned>(c.ids[i]) <= middle ? 1 : 0;
      int all = __reduce_add_sync(~0u, own);
      __syncthreads();
      if (thread == 0) to.kept = 0;
      __syncthreads();
      if (thread % 32 == 0) atomicAdd(&to.kept, all);
      __syncthreads();
      if (to.kept >= wanted) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    below = low;
  }
  if (thread == 0) to.count = 0;
  __syncthreads();
  for (int i = thread; i < kCounterRoom; i += kThreads)
    if (c.counts[i] > least || (c.counts[i] == least && static_cast<unsigned>(c.ids[i]) <= below))
      to.ids[atomicAdd(&to.count, 1)] = c.ids[i];
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void link_listed_kernel(LinkedKeys keys, NearestLists lists,
                                                               ByKey by_key, int candidates, int width,
                                                               std::int32_t* links) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Candidates c;
  __shared__ Least l;
  auto& counters = *reinterpret_cast<Counters*>(memory);  // rows come when it is no longer needed
  const std::int64_t node = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t begin = by_key.first[node], end = by_key.first[node + 1];
  if (thread == 0) l.count = l.now = c.kept = 0;
  __syncthreads();
  if (begin == end) return write_links(c, width, links + node * width);
  for (std::int32_t first = begin; first < end; first += kThreads)
    take_least(l, first + thread < end ? by_key.items[first + thread] : ~Order{0}, kListsPerKey);
  for (int i = thread; i < kCounterRoom; i += kThreads) counters.ids[i] = -1, counters.counts[i] = 0;
  if (thread <= kListsPerKey) counters.of_count[thread] = 0;
  __syncthreads();
  for (int i = thread; i < l.count * lists.each; i += kThreads) {
    const std::int64_t query = static_cast<std::int64_t>(l.kept[l.now][i / lists.each] % kMostListQueries);
    const int key = lists.keys[query * lists.each + i % lists.each];
    if (key != node) count(counters, key);
  }
  __syncthreads();
  for (int i = thread; i < kCounterRoom; i += kThreads)
    if (counters.counts[i] > 0) atomicAdd(counters.of_count + counters.counts[i], 1);
  __syncthreads();
  take_most_counted(counters, candidates, c);
  prune(c, reinterpret_cast<float*>(memory), keys, node, width, false);
  write_links(c, width, links + node * width);
}

__global__ __launch_bounds__(kThreads) void link_near_kernel(LinkedKeys keys, const std::int32_t* nodes,
                                                             const std::int32_t* near, int each, int width,
                                                             std::int32_t* links) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Candidates c;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t node = nodes[blockIdx.x];
  if (thread == 0) c.count = 0;
  __syncthreads();
  const int own = thread < each ? near[std::int64_t{blockIdx.x} * each + thread] : -1;
  if (own >= 0 && own != node) c.ids[atomicAdd(&c.count, 1)] = own;
  __syncthreads();
  prune(c, reinterpret_cast<float*>(memory), keys, node, width, false);
  write_links(c, width, links + node * width);
}

__global__ __launch_bounds__(kThreads) void add_back_kernel(LinkedKeys keys, ByKey by_target, int degree,
                                                            std::int32_t* rows) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Candidates c;
  __shared__ Least l;
  __shared__ int own[kMostLinkDegree];
  const std::int64_t node = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t begin = by_target.first[node], end = by_target.first[node + 1];
  if (begin == end) return;
  std::int32_t* const row = rows + node * degree;
  if (thread < degree) own[thread] = row[thread];
  if (thread == 0) l.count = l.now = 0;
  __syncthreads();
  int known = 0;
  while (known < degree && own[known] >= 0) ++known;
  const auto order_of = [&](std::int64_t other) {
    const float product =
        dot_anywhere(keys.rows + node * keys.width, keys.rows + other * keys.width, keys.width);
    return Order{ordered(distance(keys.squares[node], keys.squares[other], product))} << 32 |
           static_cast<unsigned>(other);
  };
  // The nearest of all, by rising distance: where there are few that is all of them.
  take_least(l, thread < known ? order_of(own[thread]) : ~Order{0}, kMostCandidates);
  std::int32_t all = known;
  for (std::int32_t first = begin; first < end; first += kThreads) {
    Order order = ~Order{0};
    if (first + thread < end) {
      const int other = static_cast<int>(by_target.items[first + thread]);
      bool is_own = false;
      for (int i = 0; i < known; ++i) is_own = is_own || own[i] == other;
      if (!is_own) order = order_of(other);
    }
    all += __syncthreads_count(order != ~Order{0} ? 1 : 0);
    take_least(l, order, kMostCandidates);
  }
  if (thread < l.count) c.ids[thread] = static_cast<int>(static_cast<unsigned>(l.kept[l.now][thread]));
  if (thread == 0) c.count = l.count;
  __syncthreads();
  if (all <= degree) {
    if (thread < degree) row[thread] = thread < all ? c.ids[thread] : -1;
    return;
  }
  prune(c, reinterpret_cast<float*>(memory), keys, node, degree, true);
  write_links(c, degree, row);
}

__global__ void square_kernel(const float* rows, std::int64_t n, int width, float* squares) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (row >= n) return;
  float sum = 0.0f;
  for (int j = static_cast<int>(threadIdx.x) % 32; j < width; j += 32) {
    const float x = rows[row * width + j];
    sum = fmaf(x, x, sum);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) squares[row] = sum;
}

/// `nodes` null: all of them.
__global__ void put_kernel(const std::int32_t* links, const std::int32_t* nodes, std::int64_t numbers,
                           int width, int degree, std::int32_t* rows) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= numbers) return;
  const std::int64_t node = nodes != nullptr ? nodes[i / degree] : i / degree, at = i % degree;
  rows[node * degree + at] = at < width ? links[node * width + at] : -1;
}

__global__ void count_kernel(const std::int32_t* keys, std::int64_t count, std::int32_t* counts) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count && keys[i] >= 0) atomicAdd(counts + keys[i], 1);
}

/// item(i) is put at keys[i].
template <class Item>
__global__ void by_key_kernel(const std::int32_t* keys, std::int64_t count, ByKey to, std::int32_t* next,
                              Item item) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count && keys[i] >= 0) to.items[atomicAdd(next + keys[i], 1)] = item(i);
}

struct ListItem {
  int each;
  __device__ std::uint32_t operator()(std::int64_t i) const {
    return static_cast<std::uint32_t>(i % each * kMostListQueries + i / each);
  }
};
struct SourceItem {
  int width;
  __device__ std::uint32_t operator()(std::int64_t i) const { return static_cast<std::uint32_t>(i / width); }
};
static_assert(kMostOfList * kMostListQueries <= std::int64_t{1} << 32);

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

std::size_t shared_for(int width) {
  return std::max(sizeof(Counters), (kMostCandidates + 1) * stride_of(width) * sizeof(float));
}

template <class... Parameters>
void launch_links(void (*kernel)(Parameters...), std::int64_t blocks, int width, StreamHandle stream,
                  const std::type_identity_t<Parameters>&... arguments) {
  if (blocks == 0) return;
  const std::size_t shared = shared_for(width);
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), static_cast<std::int64_t>(shared));
  Launch(static_cast<unsigned>(blocks), kThreads, shared, stream)(kernel, arguments...);
}

}  // namespace

void square_rows(const float* rows, std::int64_t n, int width, float* squares, StreamHandle stream) {
  if (n > 0) Launch(blocks_for(n * 32), kThreads, 0, stream)(square_kernel, rows, n, width, squares);
}

void put_links(const std::int32_t* links, const std::int32_t* nodes, std::int64_t count, int width,
               int degree, std::int32_t* rows, StreamHandle stream) {
  const std::int64_t numbers = count * degree;
  if (numbers > 0)
    Launch(blocks_for(numbers), kThreads, 0, stream)(put_kernel, links, nodes, numbers, width, degree, rows);
}

void count_keys(const std::int32_t* keys, std::int64_t count, std::int32_t* counts, StreamHandle stream) {
  if (count > 0) Launch(blocks_for(count), kThreads, 0, stream)(count_kernel, keys, count, counts);
}

void lists_by_key(const NearestLists& lists, const ByKey& to, std::int32_t* next, StreamHandle stream) {
  const std::int64_t count = lists.queries * lists.each;
  if (count > 0)
    Launch(blocks_for(count), kThreads, 0, stream)(by_key_kernel<ListItem>, lists.keys, count, to, next,
                                                   ListItem{lists.each});
}

void links_by_target(const std::int32_t* from, std::int64_t n, int width, const ByKey& to, std::int32_t* next,
                     StreamHandle stream) {
  if (n * width > 0)
    Launch(blocks_for(n * width), kThreads, 0, stream)(by_key_kernel<SourceItem>, from, n * width, to, next,
                                                       SourceItem{width});
}

void link_listed(const LinkedKeys& keys, const NearestLists& lists, const ByKey& by_key, int candidates,
                 int width, std::int32_t* links, StreamHandle stream) {
  launch_links(link_listed_kernel, keys.count, keys.width, stream, keys, lists, by_key, candidates, width,
               links);
}

void link_near(const LinkedKeys& keys, const std::int32_t* nodes, std::int64_t count,
               const std::int32_t* near, int each, int width, std::int32_t* links, StreamHandle stream) {
  launch_links(link_near_kernel, count, keys.width, stream, keys, nodes, near, each, width, links);
}

void add_links_back(const LinkedKeys& keys, const ByKey& by_target, int degree, std::int32_t* rows,
                    StreamHandle stream) {
  launch_links(add_back_kernel, keys.count, keys.width, stream, keys, by_target, degree, rows);
}

}  // namespace lode::cuda
