// SPDX-License-Identifier: Apache-2.0
// Exact selection. A cluster of eight blocks takes a list: every block holds an eighth of the keys (scores as
// unsigned numbers of the same order) in registers, those of longer lists in shared memory; histograms of 8
// bits, added up over the cluster, find the k-th largest key; a count and a prefix sum then give every chosen
// entry its place, so that rows rise and the bits never depend on timing. Threshold and bucket selections are
// the last step alone.
#include <algorithm>

#include "kernels/cuda/select.h"
#include "kernels/cuda/select_cluster.cuh"

namespace lode::cuda {

namespace {

constexpr int kBins = 256, kWarps = kSelectThreads / 32;

/// Rises with x; -0 as 0; NaN gives 0.
__device__ __forceinline__ unsigned ordered(float x) {
  if (x != x) return 0;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Sources of keys: numbers in rows, key(list, i, number). Key 0 is never chosen; kPasses of 8 bits from
/// shift() find the k-th, none where the key that must be exceeded is known.
struct FloatKeys {
  using Number = float;
  static constexpr int kPasses = 4;
  const float* scores;
  std::int64_t n;
  static __device__ int shift(int pass) { return 24 - 8 * pass; }
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t) const { return 0; }
  __device__ const float* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const {
    return x == -INFINITY ? 0 : ordered(x);
  }
};
struct LevelKeys {
  using Number = std::uint16_t;
  static constexpr int kPasses = 2;
  const std::uint16_t* scores;
  std::int64_t n;
  static __device__ int shift(int pass) { return pass == 0 ? 3 : 0; }  // of 11 bits
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t) const { return 0; }
  __device__ const std::uint16_t* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, std::uint16_t x) const {
    return min(x, 1023) + 1u;
  }
};
struct ThresholdKeys {
  using Number = float;
  static constexpr int kPasses = 0;
  const float* scores;
  const float* threshold;
  std::int64_t n;
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t list) const {
    const unsigned least = ordered(threshold[list]);
    return least == 0 ? ~0u : least - 1;
  }
  __device__ const float* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const { return ordered(x); }
};
struct BucketKeys {
  using Number = std::int32_t;
  static constexpr int kPasses = 0;
  const std::int32_t *chosen, *labels, *first;
  int probes, kv_heads, buckets;
  std::int64_t n;
  unsigned* map = nullptr;  // a bit for each bucket
  __device__ void begin(std::int64_t list, unsigned* shared) {
    map = shared;
    for (int i = static_cast<int>(threadIdx.x); i < (buckets + 31) / 32; i += kSelectThreads) map[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < probes; i += kSelectThreads) {
      const int bucket = chosen[list * probes + i];
      if (bucket >= 0 && bucket < buckets) atomicOr(&map[bucket / 32], 1u << bucket % 32);
    }
    __syncthreads();
  }
  __device__ unsigned exceed(std::int64_t) const { return 0; }
  __device__ const std::int32_t* row(std::int64_t list) const { return labels + list % kv_heads * n; }
  __device__ __forceinline__ unsigned key(std::int64_t list, int i, std::int32_t bucket) const {
    if (i < first[list]) return 0;
    return bucket >= 0 && bucket < buckets ? map[bucket / 32] >> bucket % 32 & 1u : 0u;
  }
};

struct Job {
  std::int64_t n = 0, capacity = 0;
  const std::int32_t *lengths = nullptr, *k = nullptr;
  std::int32_t *rows = nullptr, *counts = nullptr;
  bool all_ties = false;
  int held = 0;       ///< keys that a block holds in shared memory
  int map_words = 0;  ///< of shared memory for the source
};

/// Exclusive sum over the block's warps of one number a warp, which all of its lanes give.
__device__ __forceinline__ unsigned before_warp(unsigned mine, unsigned* total) {
  __shared__ unsigned sums[kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  static_assert(kWarps == 32);
  const unsigned one = sums[lane];
  *total = __reduce_add_sync(~0u, one);
  return __reduce_add_sync(~0u, lane < warp ? one : 0);
}
/// Inclusive sum over a warp.
__device__ __forceinline__ unsigned up_to(unsigned mine) {
#pragma unroll
  for (unsigned o = 1; o < 32; o *= 2) {
    const unsigned other = __shfl_up_sync(~0u, mine, o);
    if (threadIdx.x % 32 >= o) mine += other;
  }
  return mine;
}

struct Found {
  unsigned exceed;  ///< keys above are chosen
  int ties;         ///< and so many that are `exceed`
};

/// The k-th largest key of the cluster's list. `each(f)` calls f with every key of this block; the histograms
/// are zero and stay as they are until the cluster's next barrier. Adding one to a place of shared memory is
/// a single instruction however many lanes of a warp mean the same place: copies would only cost banks. Wider
/// digits would save a pass and cost more: reading another block's memory is what a pass spends its time on.
template <class Source, int Cluster, class Each>
__device__ __forceinline__ Found find(int k, unsigned* histograms /*[kPasses, kBins]*/, Each each) {
  using All = Together<Cluster>;
  __shared__ unsigned chosen_bin;
  __shared__ int above_bin;
  const int tid = static_cast<int>(threadIdx.x), bin = kBins - 1 - tid;  // from the top
  unsigned prefix = 0, mask = 0;
  for (int pass = 0; pass < Source::kPasses; ++pass) {
    const int shift = Source::shift(pass);
    unsigned* const histogram = histograms + pass * kBins;
    each([&](unsigned key) {
      if (key != 0 && (key & mask) == prefix) atomicAdd(histogram + (key >> shift & (kBins - 1)), 1u);
    });
    All::sync();
    unsigned count = 0;
    if (tid < kBins) {
      unsigned counts[Cluster];
#pragma unroll
      for (int r = 0; r < Cluster; ++r) counts[r] = All::of(histogram, r)[bin];
#pragma unroll
      for (int r = 0; r < Cluster; ++r) count += counts[r];
    }
    const unsigned lanes = up_to(count);
    unsigned sum;
    const unsigned earlier = before_warp(__shfl_sync(~0u, lanes, 31), &sum);
    const int total = static_cast<int>(sum), above = static_cast<int>(earlier + lanes - count);
    if (k >= total) return {prefix == 0 ? 0u : prefix - 1, 0};
    if (above < k && k <= above + static_cast<int>(count))
      chosen_bin = static_cast<unsigned>(bin), above_bin = above;
    __syncthreads();
    prefix |= chosen_bin << shift;
    mask |= static_cast<unsigned>(kBins - 1) << shift;
    k -= above_bin;
  }
  return {prefix, k};
}

/// What a block of a list is to do.
template <int Cluster>
struct Part {
  std::int64_t list;
  int rank, share, begin, end;  ///< entries [begin, end)

  __device__ Part(const Job& job, int multiple) {
    list = blockIdx.x / Cluster;
    const std::int64_t asked = job.lengths == nullptr ? job.n : job.lengths[list];
    const int length = static_cast<int>(asked < 0 ? 0 : asked < job.n ? asked : job.n);
    rank = Together<Cluster>::rank();
    share = ((length + Cluster - 1) / Cluster + multiple - 1) / multiple * multiple;
    begin = min(length, rank * share), end = min(length, begin + share);
  }
};
template <class Source>
__device__ void clear_histograms(unsigned* histograms) {
  for (int i = static_cast<int>(threadIdx.x); i < Source::kPasses * kBins; i += kSelectThreads)
    histograms[i] = 0;
}
__device__ int wanted_of(const Job& job, std::int64_t list) {
  return static_cast<int>(min(static_cast<std::int64_t>(job.k[list]), job.capacity));
}

/// Where a block's chosen entries go, from what all blocks of the cluster found.
struct Places {
  int above = 0, ties = 0;  ///< of earlier blocks
  int skipped = 0;          ///< ties that are not taken: they go to the higher index
};
template <class Source, int Cluster>
__device__ __forceinline__ Places places_of(const Job& job, std::int64_t list, int rank, const Found& found,
                                            int above, int ties) {
  using All = Together<Cluster>;
  __shared__ int2 totals;
  if (threadIdx.x == 0) totals = {above, ties};
  All::sync();
  int all_above = 0, all_ties = 0;
  Places places;
#pragma unroll
  for (int r = 0; r < Cluster; ++r) {
    const int2 of = *All::of(&totals, r);
    all_above += of.x;
    all_ties += of.y;
    if (r < rank) places.above += of.x, places.ties += of.y;
  }
  const int room = static_cast<int>(min(job.capacity, job.n)) - all_above;
  const int taken = Source::kPasses == 0 || found.exceed == 0 ? 0
                    : job.all_ties && found.ties > 0          ? min(all_ties, max(room, 0))
                                                              : min(found.ties, all_ties);
  places.skipped = all_ties - taken;
  if (rank == 0 && threadIdx.x == 0)
    job.counts[list] = static_cast<int>(min(static_cast<std::int64_t>(all_above + taken), job.capacity));
  return places;
}

/// Lists whose keys fit in registers: kEach a thread, a warp's entries beside one another, a lane's in fours.
template <class Source, int Cluster, int kEach>
__global__ __launch_bounds__(kSelectThreads) void select_in_registers(Source source, const Job job) {
  using Number = typename Source::Number;
  struct alignas(4 * sizeof(Number)) Four {
    Number x[4];
  };
  constexpr int kFours = kEach / 4;
  extern __shared__ __align__(16) unsigned shared[];
  const Part<Cluster> part(job, 4 * kSelectThreads);
  const std::int64_t list = part.list;
  source.begin(list, shared + Source::kPasses * kBins);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int fours = part.share / (4 * kSelectThreads);
  const int first = part.begin + warp * fours * 128 + lane * 4;
  const Number* const row = source.row(list);
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % sizeof(Four) == 0;
  Four numbers[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int at = first + i * 128;
    if (i < fours && aligned && at + 4 <= part.end) {
      numbers[i] = *reinterpret_cast<const Four*>(row + at);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) numbers[i].x[e] = i < fours && at + e < part.end ? row[at + e] : Number{};
    }
  }
  clear_histograms<Source>(shared);
  unsigned keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = first + i / 4 * 128 + i % 4;
    keys[i] = i / 4 < fours && at < part.end ? source.key(list, at, numbers[i / 4].x[i % 4]) : 0;
  }
  __syncthreads();
  Found found = {source.exceed(list), 0};
  if constexpr (Source::kPasses > 0) {
    const int k = wanted_of(job, list);
    found = {~0u, 0};
    if (k > 0) {
      found = find<Source, Cluster>(k, shared, [&](auto add) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) add(keys[i]);
      });
    }
  }
  // How many each lane has of every four, a byte each, and then how many there are up to it.
  constexpr int kWords = (kFours + 3) / 4;
  unsigned above[kWords] = {}, ties[kWords] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    above[i / 16] += keys[i] > found.exceed ? 1u << i / 4 % 4 * 8 : 0u;
    ties[i / 16] += keys[i] == found.exceed && keys[i] != 0 ? 1u << i / 4 % 4 * 8 : 0u;
  }
  unsigned above_to[kWords], ties_to[kWords], above_all[kWords], ties_all[kWords], of_warp = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    above_to[w] = up_to(above[w]) - above[w], ties_to[w] = up_to(ties[w]) - ties[w];
    above_all[w] = __shfl_sync(~0u, above_to[w] + above[w], 31);
    ties_all[w] = __shfl_sync(~0u, ties_to[w] + ties[w], 31);
    of_warp += __dp4a(above_all[w], 0x01010101u, 0u) + (__dp4a(ties_all[w], 0x01010101u, 0u) << 16);
  }
  unsigned all;
  const unsigned earlier = before_warp(of_warp, &all);
  const Places places = places_of<Source, Cluster>(
      job, list, part.rank, found, static_cast<int>(all & 0xffff), static_cast<int>(all >> 16));
  int above_before = places.above + static_cast<int>(earlier & 0xffff);
  int ties_before = places.ties + static_cast<int>(earlier >> 16) - places.skipped;
  std::int32_t* const rows = job.rows + list * job.capacity;
  const auto capacity = static_cast<int>(min(job.capacity, std::int64_t{1} << 30));
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const auto byte = [&](const unsigned(&of)[kWords]) {
      return static_cast<int>(of[i / 4] >> i % 4 * 8 & 0xff);
    };
    int up = above_before + byte(above_to), tie = ties_before + byte(ties_to);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned x = keys[4 * i + e];
      const bool is_above = x > found.exceed, is_tie = x == found.exceed && x != 0;
      const int place = up + max(0, tie);
      if ((is_above || (is_tie && tie >= 0)) && place < capacity) rows[place] = first + i * 128 + e;
      up += is_above, tie += is_tie;
    }
    above_before += byte(above_all), ties_before += byte(ties_all);
  }
  Together<Cluster>::sync();  // the totals are read by the others until here
}

/// Lists of any length.
template <class Source, int Cluster>
__global__ __launch_bounds__(kSelectThreads) void select_kernel(Source source, const Job job) {
  extern __shared__ __align__(16) unsigned shared[];
  unsigned* const held = shared + Source::kPasses * kBins;
  const Part<Cluster> part(job, kSelectThreads);
  const std::int64_t list = part.list;
  source.begin(list, held);
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  const typename Source::Number* const numbers = source.row(list);
  const bool hold = Source::kPasses > 0 && part.share <= job.held;
  clear_histograms<Source>(shared);
  if (hold) {
#pragma unroll 4
    for (int i = part.begin + tid; i < part.end; i += kSelectThreads)
      held[i - part.begin] = source.key(list, i, numbers[i]);
  }
  __syncthreads();
  const auto key = [&](int i) { return hold ? held[i - part.begin] : source.key(list, i, numbers[i]); };
  Found found = {source.exceed(list), 0};
  if constexpr (Source::kPasses > 0) {
    const int k = wanted_of(job, list);
    found = {~0u, 0};
    if (k > 0) {
      found = find<Source, Cluster>(k, shared, [&](auto add) {
        if (hold) {
          for (int i = part.begin + tid; i < part.end; i += kSelectThreads) add(held[i - part.begin]);
        } else {
#pragma unroll 8
          for (int i = part.begin + tid; i < part.end; i += kSelectThreads) add(key(i));
        }
      });
    }
  }
  // A warp takes consecutive entries: first it counts them.
  const int per_warp = part.share / kWarps, from = part.begin + tid / 32 * per_warp;
  const int to = min(part.end, from + per_warp);
  unsigned above = 0, ties = 0;
#pragma unroll 8
  for (int i = from + lane; i < to; i += 32) {
    const unsigned x = key(i);
    above += x > found.exceed;
    ties += x == found.exceed && x != 0;
  }
  unsigned all_above, all_ties;
  const unsigned above_earlier = before_warp(__reduce_add_sync(~0u, above), &all_above);
  const unsigned ties_earlier = before_warp(__reduce_add_sync(~0u, ties), &all_ties);
  const Places places = places_of<Source, Cluster>(job, list, part.rank, found, static_cast<int>(all_above),
                                                   static_cast<int>(all_ties));
  int above_before = places.above + static_cast<int>(above_earlier);
  int ties_before = places.ties + static_cast<int>(ties_earlier);
#pragma unroll 4
  for (int i = from; i < to; i += 32) {
    const unsigned x = i + lane < to ? key(i + lane) : 0, lower = (1u << lane) - 1;
    const bool is_tie = x == found.exceed && x != 0;
    const unsigned aboves = __ballot_sync(~0u, x > found.exceed), equals = __ballot_sync(~0u, is_tie);
    const int tie = ties_before + __popc(equals & lower);
    const std::int64_t place = above_before + __popc(aboves & lower) + max(0, tie - places.skipped);
    if ((x > found.exceed || (is_tie && tie >= places.skipped)) && place < job.capacity)
      job.rows[list * job.capacity + place] = i + lane;
    above_before += __popc(aboves);
    ties_before += __popc(equals);
  }
  Together<Cluster>::sync();  // the totals are read by the others until here
}

template <class Source>
void run(const Source& source, Job job, std::int64_t lists, StreamHandle stream) {
  if (lists == 0) return;
  const int histograms = Source::kPasses * kBins * 4, fixed = histograms + 4 * job.map_words;
  const auto launch = [&]<int Cluster>(std::integral_constant<int, Cluster>) {
    const std::int64_t all = std::int64_t{Cluster} * kSelectThreads;
    if (job.n <= 16 * all)
      return launch_together<Cluster>(select_in_registers<Source, Cluster, 16>, lists, fixed, stream, source,
                                      job);
    const std::int64_t share = (job.n + all - 1) / all * kSelectThreads;
    const std::int64_t fits = (shared_bytes_per_block() - histograms) / 4;
    job.held = static_cast<int>(Source::kPasses > 0 && share <= fits ? share : 0);
    launch_together<Cluster>(select_kernel<Source, Cluster>, lists,
                             histograms + 4 * std::max(job.held, job.map_words), stream, source, job);
  };
  if (has_clusters())
    launch(std::integral_constant<int, kCluster>());
  else
    launch(std::integral_constant<int, 1>());
}

}  // namespace

std::int64_t select_workspace_bytes(std::int64_t, std::int64_t) {
  return 16;  // selections work in shared memory
}

void top_k(const float* scores, std::int64_t lists, std::int64_t n, const std::int32_t* lengths,
           const std::int32_t* k, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, void*,
           StreamHandle stream) {
  run(FloatKeys{scores, n},
      {.n = n, .capacity = capacity, .lengths = lengths, .k = k, .rows = rows, .counts = counts}, lists,
      stream);
}

void counting_select(const std::uint16_t* scores, int, bool all_ties, std::int64_t lists, std::int64_t n,
                     const std::int32_t* lengths, const std::int32_t* k, std::int32_t* rows,
                     std::int64_t capacity, std::int32_t* counts, void*, StreamHandle stream) {
  run(LevelKeys{scores, n},
      {.n = n,
       .capacity = capacity,
       .lengths = lengths,
       .k = k,
       .rows = rows,
       .counts = counts,
       .all_ties = all_ties},
      lists, stream);
}

void threshold_select(const float* scores, const float* threshold, std::int64_t lists, std::int64_t n,
                      const std::int32_t* lengths, std::int32_t* rows, std::int64_t capacity,
                      std::int32_t* counts, void*, StreamHandle stream) {
  run(ThresholdKeys{scores, threshold, n},
      {.n = n, .capacity = capacity, .lengths = lengths, .rows = rows, .counts = counts}, lists, stream);
}

void buckets_to_rows(const std::int32_t* chosen, int probes, const std::int32_t* labels, int kv_heads,
                     int buckets, std::int64_t lists, std::int64_t n, const std::int32_t* begin,
                     const std::int32_t* end, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts,
                     void*, StreamHandle stream) {
  run(BucketKeys{chosen, labels, begin, probes, kv_heads, buckets, n},
      {.n = n,
       .capacity = capacity,
       .lengths = end,
       .rows = rows,
       .counts = counts,
       .map_words = (buckets + 31) / 32},
      lists, stream);
}

}  // namespace lode::cuda
