// SPDX-License-Identifier: Apache-2.0
// Work map: a block makes one walk after another. A turn expands the best four nodes that are not expanded, one thread a
// link; eight lanes score a key; what is good enough is put in its place among the best by counting. The best nodes are
// in shared memory in order; a block's own bits in global memory tell which nodes it has seen, of which there may be many
// more than it keeps.
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ordered.cuh"
#include "kernels/cuda/graph/walks.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kTogether = 4, kLanes = 8;
constexpr int kWantedRoom = 256;
constexpr std::uint32_t kTree = 0x80000000u, kNone = kTree - 1;  // as in ann/graph/key_graph.h
static_assert(kTogether * kMostWalkedDegree <= kThreads);

using Entry = unsigned long long;  // [order of the score | node | 1 while it is not expanded]

struct Walk {
  Entry best[2][kWalkKeeps], fresh[kThreads];
  int collected[kThreads], chosen[kTogether];
  int best_count, fresh_count, collected_count, chosen_count;
};

__device__ __forceinline__ int node_of(Entry entry) {
  return static_cast<int>(static_cast<unsigned>(entry) >> 1);
}

__device__ __forceinline__ unsigned place_of(int node, unsigned room) {
  return (static_cast<unsigned>(node) * 2654435761u >> 8) & (room - 1);
}

__device__ __forceinline__ void insert(int* table, unsigned room, int node) {
  for (unsigned at = place_of(node, room);; at = (at + 1) & (room - 1)) {
    const int before = atomicCAS(table + at, -1, node);
    if (before == -1 || before == node) return;
  }
}

__device__ __forceinline__ bool contains(const int* table, unsigned room, int node) {
  for (unsigned at = place_of(node, room); table[at] != -1; at = (at + 1) & (room - 1))
    if (table[at] == node) return true;
  return false;
}

__device__ __forceinline__ void collect(Walk& w, unsigned* seen, int node) {
  const unsigned bit = 1u << (node & 31);
  if ((atomicOr(seen + (node >> 5), bit) & bit) == 0) w.collected[atomicAdd(&w.collected_count, 1)] = node;
}

/// The product of codes with 16-bit numbers, of all lanes of the key.
__device__ __forceinline__ int product(const int4* row, const int4* high, const int4* low, int pieces,
                                       int lane) {
  int of_high = 0, of_low = 0;
  for (int piece = lane; piece < pieces; piece += kLanes) {
    const int4 k = __ldg(row + piece), h = high[piece], l = low[piece];
    of_high = __dp4a(k.x, h.x, __dp4a(k.y, h.y, __dp4a(k.z, h.z, __dp4a(k.w, h.w, of_high))));
    of_low = __dp4a(k.x, l.x, __dp4a(k.y, l.y, __dp4a(k.z, l.z, __dp4a(k.w, l.w, of_low))));
  }
  int sum = of_high * 256 + of_low;
#pragma unroll
  for (int o = 1; o < kLanes; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

__device__ __forceinline__ float scale_of(const WalkedGraph& g, std::int64_t node) {
  return *reinterpret_cast<const float*>(static_cast<const char*>(g.rows) + (node + 1) * g.stride - 4);
}

/// Scores what was collected; what belongs among the best is fresh then.
__device__ void score(Walk& w, int now, int keep, const WalkedGraph& g, const int4* high, const int4* low,
                      int pieces) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, count = w.collected_count;
  const Entry last = w.best_count >= keep ? w.best[now][keep - 1] : 0;
  for (int first = 0; first < count; first += kThreads / kLanes) {
    const int at = first + static_cast<int>(threadIdx.x) / kLanes;
    const int node = w.collected[min(at, count - 1)];
    const auto* const row =
        reinterpret_cast<const int4*>(static_cast<const char*>(g.rows) + std::int64_t{node} * g.stride);
    const int sum = product(row, high, low, pieces, lane);
    if (lane != 0 || at >= count) continue;
    const Entry entry = Entry{ordered(scale_of(g, node) * static_cast<float>(sum))} << 32 |
                        static_cast<unsigned>(node) << 1 | 1u;
    if (entry > last) w.fresh[atomicAdd(&w.fresh_count, 1)] = entry;
  }
}

/// Puts what is fresh in its place: each entry stands behind all that are larger.
__device__ void merge(Walk& w, int now, int keep) {
  const Entry* const old = w.best[now];
  Entry* const to = w.best[now ^ 1];
  const int count = w.best_count, fresh = w.fresh_count;
  const auto above_in_fresh = [&](Entry entry) {
    int above = 0;
    for (int i = 0; i < fresh; ++i) above += w.fresh[i] > entry ? 1 : 0;
    return above;
  };
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int at = i + above_in_fresh(old[i]);
    if (at < keep) to[at] = old[i];
  }
  if (const int i = static_cast<int>(threadIdx.x); i < fresh) {
    const Entry entry = w.fresh[i];
    int low = 0, high = count;  // of the old ones that are larger
    while (low < high) {
      const int middle = (low + high) / 2;
      if (old[middle] > entry) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int at = low + above_in_fresh(entry);
    if (at < keep) to[at] = entry;
  }
}

/// The best nodes of the best `beam` that are not expanded are from here on. By the first warp.
__device__ void choose(Walk& w, int now, int beam) {
  const int lane = static_cast<int>(threadIdx.x), end = min(beam, w.best_count);
  int count = 0;
  for (int first = 0; first < end && count < kTogether; first += 32) {
    const int at = first + lane;
    const bool pending = at < end && (w.best[now][at] & 1u) != 0;
    const unsigned all = __ballot_sync(~0u, pending);
    const int rank = count + __popc(all & ((1u << lane) - 1));
    if (pending && rank < kTogether) {
      w.chosen[rank] = node_of(w.best[now][at]);
      w.best[now][at] &= ~Entry{1};
    }
    count = min(kTogether, count + __popc(all));
  }
  if (lane == 0) w.chosen_count = count;
}

/// Which of the two lists has the best nodes in the end.
__device__ int run(Walk& w, unsigned* seen, const WalkedGraph& g, const int4* high, const int4* low,
                   int pieces, int beam, int keep) {
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t i = thread; i < seen_words(g.nodes) / 4; i += kThreads)
    reinterpret_cast<uint4*>(seen)[i] = make_uint4(0, 0, 0, 0);
  if (thread == 0) w.best_count = w.fresh_count = w.collected_count = 0;
  __syncthreads();
  if (thread < g.entry_count) collect(w, seen, g.entries[thread]);
  for (int now = 0;; now ^= 1) {
    __syncthreads();
    score(w, now, keep, g, high, low, pieces);
    __syncthreads();
    merge(w, now, keep);
    __syncthreads();
    if (thread == 0) {
      w.best_count = min(keep, w.best_count + w.fresh_count);
      w.fresh_count = w.collected_count = 0;
    }
    __syncthreads();
    if (thread < 32) choose(w, now ^ 1, beam);
    __syncthreads();
    if (w.chosen_count == 0) return now ^ 1;
    if (thread < w.chosen_count * g.degree) {
      const std::int64_t node = w.chosen[thread / g.degree];
      const std::uint32_t link = __ldg(g.links + node * g.degree + thread % g.degree);
      if (link != kNone) collect(w, seen, static_cast<int>(link & ~kTree));
    }
  }
}

enum class Outcome { uses, found, best };

struct Watched {
  int beam = 0, keep = kWalkKeeps;
  std::uint32_t *visits = nullptr, *uses = nullptr;
  std::uint64_t* found = nullptr;
  std::int32_t* best = nullptr;
};

__device__ void count_uses(const Walk& w, int now, const WalkedGraph& g, const int* wanted,
                           const Watched& to) {
  const int links = min(to.beam, w.best_count) * g.degree;
  for (int i = static_cast<int>(threadIdx.x); i < links; i += kThreads) {
    const std::int64_t node = node_of(w.best[now][i / g.degree]);
    if (i % g.degree == 0) atomicAdd(to.visits + node, 1);
    const std::int64_t at = node * g.degree + i % g.degree;
    const std::uint32_t link = __ldg(g.links + at);
    if (link != kNone && contains(wanted, kWantedRoom, static_cast<int>(link & ~kTree)))
      atomicAdd(to.uses + at, 1);
  }
}

template <Outcome kOutcome>
__device__ void note(Walk& w, int now, const WalkedGraph& g, const WalkingQueries& q, std::int64_t query,
                     const Watched& to) {
  __shared__ int wanted[kWantedRoom];
  __shared__ unsigned long long found;
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kOutcome == Outcome::best) {
    for (int i = thread; i < to.keep; i += kThreads)
      to.best[query * to.keep + i] = i < w.best_count ? node_of(w.best[now][i]) : -1;
    return;
  }
  const int own = thread < q.each ? q.wanted[query * q.each + thread] : -1;
  for (int i = thread; i < kWantedRoom; i += kThreads) wanted[i] = -1;
  if (thread == 0) found = 0;
  __syncthreads();
  if constexpr (kOutcome == Outcome::uses) {
    if (own >= 0) insert(wanted, kWantedRoom, own);
    __syncthreads();
    count_uses(w, now, g, wanted, to);
  } else {
    bool is_found = false;
    for (int i = 0; i < w.best_count && !is_found; ++i) is_found = own >= 0 && node_of(w.best[now][i]) == own;
    if (is_found) atomicOr(&found, 1ull << thread);
    __syncthreads();
    if (thread == 0) to.found[query] = found;
  }
}

template <Outcome kOutcome>
__global__ __launch_bounds__(kThreads) void walk_kernel(const __grid_constant__ WalkedGraph g,
                                                        const __grid_constant__ WalkingQueries q,
                                                        Watched to) {
  extern __shared__ __align__(16) char memory[];
  auto& w = *reinterpret_cast<Walk*>(memory);
  const int pieces = q.code_bytes / 16;
  int4* const codes = reinterpret_cast<int4*>(memory + sizeof(Walk));
  unsigned* const seen = g.seen + blockIdx.x * seen_words(g.nodes);
  for (std::int64_t query = blockIdx.x; query < q.count; query += gridDim.x) {
    __syncthreads();  // with the walk before
    for (int i = static_cast<int>(threadIdx.x); i < 2 * pieces; i += kThreads)
      codes[i] = static_cast<const int4*>(q.codes)[query * 2 * pieces + i];
    const int now = run(w, seen, g, codes, codes + pieces, pieces, to.beam, to.keep);
    note<kOutcome>(w, now, g, q, query, to);
  }
}

template <Outcome kOutcome>
void launch_walks(const WalkedGraph& graph, const WalkingQueries& queries, const Watched& to,
                  StreamHandle stream) {
  if (queries.count == 0 || graph.nodes == 0) return;
  const int shared = static_cast<int>(sizeof(Walk)) + 2 * queries.code_bytes;
  allow_shared_bytes(reinterpret_cast<const void*>(walk_kernel<kOutcome>), shared);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(queries.count, kWalksAtOnce));
  Launch(blocks, kThreads, static_cast<std::size_t>(shared), stream)(walk_kernel<kOutcome>, graph, queries,
                                                                     to);
}

/// A warp for each missed key: distances to the found ones two a lane, then the least of them six times.
__global__ void offers_kernel(WalkedGraph g, const float* squares, int numbers, WalkingQueries q,
                              const std::uint64_t* found, const MissedKey* missed, std::int64_t count,
                              std::int32_t* offers) {
  const std::int64_t at = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (at >= count) return;
  const MissedKey m = missed[at];
  const std::int32_t* const wanted = q.wanted + std::int64_t{m.query} * q.each;
  const std::uint64_t there = found[m.query];
  const auto row_of = [&](std::int64_t node) {
    return reinterpret_cast<const std::int8_t*>(g.rows) + node * g.stride;
  };
  const std::int64_t key = wanted[m.rank];
  std::uint64_t best[2];  // [order of the distance | the key]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int rank = i * 32 + lane;
    best[i] = ~std::uint64_t{0};
    if (rank >= q.each || (there >> rank & 1) == 0) continue;
    const std::int64_t other = wanted[rank];
    int sum = 0;
    const auto *const a = reinterpret_cast<const int*>(row_of(key)), *const b = reinterpret_cast<const int*>(
                                                                         row_of(other));
    for (int j = 0; j < numbers / 4; ++j) sum = __dp4a(a[j], b[j], sum);
    for (int j = numbers / 4 * 4; j < numbers; ++j) sum += row_of(key)[j] * row_of(other)[j];
    const float distance = squares[key] + squares[other] -
                           2.0f * scale_of(g, key) * scale_of(g, other) * static_cast<float>(sum);
    best[i] = std::uint64_t{ordered(distance != distance ? INFINITY : distance)} << 32 |
              static_cast<unsigned>(other);
  }
  for (int offer = 0; offer < kMostOffers; ++offer) {
    std::uint64_t least = min(best[0], best[1]);
#pragma unroll
    for (int o = 1; o < 32; o *= 2) least = min(least, __shfl_xor_sync(~0u, least, o));
    if (lane == 0)
      offers[at * kMostOffers + offer] = least == ~std::uint64_t{0} ? -1 : static_cast<std::int32_t>(least);
#pragma unroll
    for (std::uint64_t& own : best)
      if (own == least) own = ~std::uint64_t{0};
  }
}

}  // namespace

void watch_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam, std::uint32_t* visits,
                 std::uint32_t* uses, StreamHandle stream) {
  launch_walks<Outcome::uses>(graph, queries, {.beam = beam, .visits = visits, .uses = uses}, stream);
}

void found_by_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam, std::uint64_t* found,
                    StreamHandle stream) {
  launch_walks<Outcome::found>(graph, queries, {.beam = beam, .found = found}, stream);
}

void best_by_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam, int keep,
                   std::int32_t* best, StreamHandle stream) {
  launch_walks<Outcome::best>(graph, queries, {.beam = beam, .keep = keep, .best = best}, stream);
}

void offers_for(const WalkedGraph& graph, const float* squares, int numbers, const WalkingQueries& queries,
                const std::uint64_t* found, const MissedKey* missed, std::int64_t count, std::int32_t* offers,
                StreamHandle stream) {
  if (count == 0) return;
  Launch(static_cast<unsigned>((count * 32 + kThreads - 1) / kThreads), kThreads, 0, stream)(
      offers_kernel, graph, squares, numbers, queries, found, missed, count, offers);
}

}  // namespace lode::cuda
