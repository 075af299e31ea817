// SPDX-License-Identifier: Apache-2.0
// Exact selection. A cluster of eight blocks takes a list: every block holds an eighth of the keys (scores as
// unsigned numbers of the same order) in shared memory; histograms of 11 bits, added up over the cluster,
// find the k-th largest key; a count and a prefix sum then give every chosen entry its place, so that rows
// rise and the bits never depend on timing. Threshold and bucket selections are the last step alone.
#include <algorithm>

#include "kernels/cuda/select.h"
#include "kernels/cuda/select_cluster.cuh"

namespace lode::cuda {

namespace {

constexpr int kBins = 2048, kCopies = 4, kWarps = kSelectThreads / 32;

/// Rises with x; -0 as 0; NaN gives 0.
__device__ __forceinline__ unsigned ordered(float x) {
  if (x != x) return 0;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Sources of keys. Key 0 is never chosen; kPasses of 11 bits from kShifts find the k-th, none where the
/// key that must be exceeded is known.
struct FloatKeys {
  static constexpr int kPasses = 3;
  const float* scores;
  std::int64_t n;
  static __device__ int shift(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
  static __device__ int bits(int pass) { return pass == 2 ? 10 : 11; }
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t) const { return 0; }
  __device__ __forceinline__ unsigned key(std::int64_t list, std::int64_t i) const {
    const float x = scores[list * n + i];
    return x == -INFINITY ? 0 : ordered(x);
  }
};
struct LevelKeys {
  static constexpr int kPasses = 1;
  const std::uint16_t* scores;
  std::int64_t n;
  static __device__ int shift(int) { return 0; }
  static __device__ int bits(int) { return 11; }
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t) const { return 0; }
  __device__ __forceinline__ unsigned key(std::int64_t list, std::int64_t i) const {
    return min(scores[list * n + i], 1023) + 1u;
  }
};
struct ThresholdKeys {
  static constexpr int kPasses = 0;
  const float* scores;
  const float* threshold;
  std::int64_t n;
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ unsigned exceed(std::int64_t list) const {
    const unsigned least = ordered(threshold[list]);
    return least == 0 ? ~0u : least - 1;
  }
  __device__ __forceinline__ unsigned key(std::int64_t list, std::int64_t i) const {
    return ordered(scores[list * n + i]);
  }
};
struct BucketKeys {
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
  __device__ __forceinline__ unsigned key(std::int64_t list, std::int64_t i) const {
    if (i < first[list]) return 0;
    const int bucket = labels[list % kv_heads * n + i];
    return bucket >= 0 && bucket < buckets ? map[bucket / 32] >> bucket % 32 & 1u : 0u;
  }
};

struct Job {
  std::int64_t n = 0, capacity = 0;
  const std::int32_t *lengths = nullptr, *k = nullptr;
  std::int32_t *rows = nullptr, *counts = nullptr;
  bool all_ties = false;
  int held = 0;       ///< keys that fit in shared memory
  int map_words = 0;  ///< of shared memory for the source
};

/// Exclusive sum over the block of one number a thread, in the order of threads.
__device__ __forceinline__ int before(int mine, int* total) {
  __shared__ int sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int up_to = mine;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, o);
    if (lane >= o) up_to += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  int earlier = lane < warp ? sums[lane] : 0, all = sums[lane];
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    earlier += __shfl_xor_sync(~0u, earlier, o);
    all += __shfl_xor_sync(~0u, all, o);
  }
  *total = all;
  return earlier + up_to - mine;
}

struct Found {
  unsigned exceed;  ///< keys above are chosen
  int ties;         ///< and so many that are `exceed`
};

/// The k-th largest key of the cluster's list. `each(f)` calls f with every key of this block.
template <class Source, int Cluster, class Each>
__device__ Found find(int k, unsigned* histogram /*[kCopies, kBins]*/, Each each) {
  using All = Together<Cluster>;
  __shared__ unsigned chosen_bin;
  __shared__ int above_bin;
  unsigned prefix = 0, mask = 0;
  for (int pass = 0; pass < Source::kPasses; ++pass) {
    const int shift = Source::shift(pass), tid = static_cast<int>(threadIdx.x);
    const unsigned bins = 1u << Source::bits(pass);
    for (int i = tid; i < kCopies * kBins; i += kSelectThreads) histogram[i] = 0;
    __syncthreads();
    unsigned* const mine = histogram + tid % kCopies * kBins;
    each([&](unsigned key) {
      if (key != 0 && (key & mask) == prefix) atomicAdd(mine + (key >> shift & (bins - 1)), 1u);
    });
    __syncthreads();
    for (int i = tid; i < kBins; i += kSelectThreads)
      histogram[i] += histogram[kBins + i] + histogram[2 * kBins + i] + histogram[3 * kBins + i];
    All::sync();
    // Thread t takes the bins 2t and 2t + 1 from the top.
    const int high = kBins - 1 - 2 * tid;
    int counts[2] = {};
    for (int r = 0; r < Cluster; ++r) {
      const uint2 two = *reinterpret_cast<const uint2*>(All::of(histogram, r) + high - 1);
      counts[0] += static_cast<int>(two.y);
      counts[1] += static_cast<int>(two.x);
    }
    int total;
    const int above = before(counts[0] + counts[1], &total);
    All::sync();  // before the histograms are cleared
    if (k >= total) return {prefix == 0 ? 0u : prefix - 1, 0};
    if (above < k && k <= above + counts[0]) chosen_bin = static_cast<unsigned>(high), above_bin = above;
    if (above + counts[0] < k && k <= above + counts[0] + counts[1])
      chosen_bin = static_cast<unsigned>(high - 1), above_bin = above + counts[0];
    __syncthreads();
    prefix |= chosen_bin << shift;
    mask |= (bins - 1) << shift;
    k -= above_bin;
    __syncthreads();
  }
  return {prefix, k};
}

template <class Source, int Cluster>
__global__ __launch_bounds__(kSelectThreads) void select_kernel(Source source, const Job job) {
  using All = Together<Cluster>;
  extern __shared__ __align__(16) unsigned shared[];
  __shared__ int totals[2];
  unsigned *const histogram = shared, *const held = shared + (Source::kPasses > 0 ? kCopies * kBins : 0);
  const std::int64_t list = blockIdx.x / Cluster;
  source.begin(list, held);
  const std::int64_t asked = job.lengths == nullptr ? job.n : job.lengths[list];
  const int length = static_cast<int>(asked < 0 ? 0 : asked < job.n ? asked : job.n);
  const int rank = All::rank(), tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  const int share = ((length + Cluster - 1) / Cluster + kSelectThreads - 1) / kSelectThreads * kSelectThreads;
  const int begin = min(length, rank * share), end = min(length, begin + share);
  const bool hold = Source::kPasses > 0 && share <= job.held;
  if (hold) {
#pragma unroll 4
    for (int i = begin + tid; i < end; i += kSelectThreads) held[i - begin] = source.key(list, i);
    __syncthreads();
  }
  const auto key = [&](int i) { return hold ? held[i - begin] : source.key(list, i); };
  Found found = {source.exceed(list), 0};
  bool none = false;
  if constexpr (Source::kPasses > 0) {
    const int k = static_cast<int>(min(static_cast<std::int64_t>(job.k[list]), job.capacity));
    none = k <= 0;
    if (!none) {
      found = find<Source, Cluster>(k, histogram, [&](auto add) {
        for (int i = begin + tid; i < end; i += kSelectThreads) add(key(i));
      });
    }
  }
  // A warp takes consecutive entries: first it counts them.
  const int per_warp = share / kWarps, from = begin + tid / 32 * per_warp;
  const int to = none ? from : min(end, from + per_warp);
  int above = 0, ties = 0;
  for (int i = from + lane; i < to; i += 32) {
    const unsigned x = key(i);
    above += x > found.exceed;
    ties += x == found.exceed && x != 0;
  }
  int all_above, all_ties;
  int above_before = before(above, &all_above), ties_before = before(ties, &all_ties);
  if (tid == 0) totals[0] = all_above, totals[1] = all_ties;
  All::sync();
  int cluster_above = 0, cluster_ties = 0, earlier_above = 0, earlier_ties = 0;
  for (int r = 0; r < Cluster; ++r) {
    const int* of = All::of(totals, r);
    cluster_above += of[0];
    cluster_ties += of[1];
    if (r < rank) earlier_above += of[0], earlier_ties += of[1];
  }
  const int room = static_cast<int>(min(job.capacity, job.n)) - cluster_above;
  const int taken = Source::kPasses == 0 || found.exceed == 0 ? 0
                    : job.all_ties                            ? min(cluster_ties, max(room, 0))
                                                              : min(found.ties, cluster_ties);
  const int skipped = cluster_ties - taken;  // ties go to the higher index
  above_before = __shfl_sync(~0u, above_before, 0) + earlier_above;
  ties_before = __shfl_sync(~0u, ties_before, 0) + earlier_ties;
  for (int i = from; i < to; i += 32) {
    const unsigned x = i + lane < to ? key(i + lane) : 0, lower = (1u << lane) - 1;
    const bool is_tie = x == found.exceed && x != 0;
    const unsigned aboves = __ballot_sync(~0u, x > found.exceed), equals = __ballot_sync(~0u, is_tie);
    const int tie = ties_before + __popc(equals & lower);
    const std::int64_t place = above_before + __popc(aboves & lower) + max(0, tie - skipped);
    if ((x > found.exceed || (is_tie && tie >= skipped)) && place < job.capacity)
      job.rows[list * job.capacity + place] = i + lane;
    above_before += __popc(aboves);
    ties_before += __popc(equals);
  }
  if (rank == 0 && tid == 0)
    job.counts[list] = static_cast<int>(min(static_cast<std::int64_t>(cluster_above + taken), job.capacity));
  All::sync();  // the totals are read by the others until here
}

template <class Source>
void run(const Source& source, Job job, std::int64_t lists, StreamHandle stream) {
  if (lists == 0) return;
  const int histograms = Source::kPasses > 0 ? kCopies * kBins * 4 : 0;
  const auto launch = [&]<int Cluster>(std::integral_constant<int, Cluster>) {
    const std::int64_t share =
        ((job.n + Cluster - 1) / Cluster + kSelectThreads - 1) / kSelectThreads * kSelectThreads;
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
