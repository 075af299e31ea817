// SPDX-License-Identifier: Apache-2.0
// Exact selection. A cluster of up to sixteen blocks takes a list, or of fewer where lists are many or short:
// every block holds its share of the keys (scores as unsigned numbers of the same order) in registers, those
// of longer lists in shared memory; the blocks find the k-th largest key together (kth_key.cuh); a count and
// a prefix sum then give every chosen entry its place, so that rows rise and the bits never depend on timing.
// Threshold and bucket selections are the last step alone. Where an entry is a page, its place is that of its
// keys.
#include <algorithm>

#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/select/counting_select.h"
#include "kernels/cuda/select/kth_key.cuh"
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/select/select_sources.cuh"

namespace lode::cuda {

namespace {

using namespace selection;

constexpr int kEach = 16;  // keys that a thread holds in registers

/// Exclusive sum over the block's warps of one number a warp, which all of its lanes give.
template <int Threads>
__device__ __forceinline__ unsigned before_warp(unsigned mine, unsigned* total) {
  constexpr unsigned kWarps = Threads / 32;
  __shared__ unsigned sums[kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  const unsigned one = lane < kWarps ? sums[lane] : 0;
  *total = __reduce_add_sync(~0u, one);
  return __reduce_add_sync(~0u, lane < warp ? one : 0);
}
__device__ __forceinline__ unsigned up_to(unsigned mine) {
  return sum_up_to(mine, static_cast<int>(threadIdx.x % 32));
}

/// What a block of a list is to do.
template <int Cluster>
struct Part {
  int length, rank, share, begin, end;  ///< entries [begin, end) of a list's `length`

  __device__ Part(const Job& job, std::int64_t asked, int multiple) {
    length = static_cast<int>(asked < 0 ? 0 : asked < job.n ? asked : job.n);
    rank = Together<Cluster>::rank();
    share = ((length + Cluster - 1) / Cluster + multiple - 1) / multiple * multiple;
    begin = min(length, rank * share), end = min(length, begin + share);
  }
};
template <class Source>
__device__ void clear_histograms(unsigned* histograms) {
  for (int i = static_cast<int>(threadIdx.x); i < Source::kPasses * kBins; i += static_cast<int>(blockDim.x))
    histograms[i] = 0;
}

/// Of the thread, a key of the sample that says where to look for the k-th largest first.
template <class Source>
__device__ __forceinline__ unsigned sampled_key(const Source& source, std::int64_t list, int length) {
  const int tid = static_cast<int>(threadIdx.x);
  if (!Source::kSampled || tid >= kSample || length < kLeastSampled) return 0;
  const int at = static_cast<int>(std::int64_t{tid} * length / kSample);
  return source.key(list, at, source.row(list)[at]);
}
/// Where to look first, by all threads of the list's blocks.
template <class Source, int Threads>
__device__ __forceinline__ Range first_range(const Source& source, unsigned sampled, int k, int length) {
  if constexpr (Source::kSampled) {
    // With fewer than two of the k largest in a sample it says too little.
    if (length >= kLeastSampled && k < length && std::int64_t{k} * kSample >= std::int64_t{2} * length)
      return likely_range<Threads>(sampled, k, length);
  }
  return Range::closed(1, source.largest());
}

/// What all blocks of the cluster have above the key that must be exceeded, where it was known.
template <int Cluster>
__device__ __forceinline__ Found count_all(unsigned exceed, int rank, int above) {
  using All = Together<Cluster>;
  __shared__ int mine;
  if (threadIdx.x == 0) mine = above;
  All::sync();
  Found found;
  found.exceed = exceed;
#pragma unroll
  for (int r = 0; r < Cluster; ++r) {
    const int of = *All::of(&mine, r);
    found.all_above += of;
    if (r < rank) found.above += of;
  }
  return found;
}
/// How many of all ties are not taken, those of lower index. Tells how many rows are chosen.
template <class Source>
__device__ __forceinline__ int skipped_ties(const Source& source, const Job& job, std::int64_t list, int rank,
                                            const Found& found) {
  const int room = static_cast<int>(min(job.capacity, job.n)) - found.all_above;
  const int taken = job.all_ties && found.wanted > 0 ? min(found.all_ties, max(room, 0))
                                                     : min(found.wanted, found.all_ties);
  if (rank == 0 && threadIdx.x == 0)
    job.counts[list] = static_cast<int>(
        min(static_cast<std::int64_t>(source.rows_of(found.all_above + taken)), job.capacity));
  return found.all_ties - taken;
}

/// How many of each four bits are set, a byte each.
__device__ __forceinline__ unsigned count_fours(unsigned bits /*16*/) {
  unsigned x = (bits & 0x5555u) + (bits >> 1 & 0x5555u);
  x = (x & 0x3333u) + (x >> 2 & 0x3333u);
  return (x & 0xfu) | (x & 0xf0u) << 4 | (x & 0xf00u) << 8 | (x & 0xf000u) << 12;
}
/// Sums of the bytes before each one, 16 bits each.
__device__ __forceinline__ std::uint64_t before_bytes(unsigned bytes) {
  const std::uint64_t spread =
      (bytes & 0xffu) | std::uint64_t{bytes & 0xff00u} << 8 | std::uint64_t{bytes & 0xff0000u} << 16;
  return (spread << 16) + (spread << 32) + (spread << 48);
}
/// Of one kind of entry in a block: which a lane has, and how many come before them.
struct Kind {
  unsigned bits = 0;       ///< of the lane's keys
  unsigned lanes = 0;      ///< of earlier lanes, in each run of 128 entries, a byte each
  std::uint64_t runs = 0;  ///< of earlier runs of the warp, 16 bits each
  unsigned warp = 0;       ///< of the warp

  __device__ void count() {
    const unsigned mine = count_fours(bits), to = up_to(mine), all = __shfl_sync(~0u, to, 31);
    lanes = to - mine, runs = before_bytes(all), warp = __dp4a(all, 0x01010101u, 0u);
  }
  /// Entries of the warp in front of the lane's key `at`.
  __device__ int before(int at) const {
    const int run = at / 4;
    const unsigned same_run = bits & ((1u << at) - 1) & ~((1u << run * 4) - 1);
    return static_cast<int>(static_cast<unsigned>(runs >> run * 16) & 0xffffu) +
           static_cast<int>(lanes >> run * 8 & 0xffu) + __popc(same_run);
  }
};

/// Lists whose keys fit in registers: a warp's entries beside one another, a lane's in fours.
template <class Source, int Cluster, int Threads>
__global__ __launch_bounds__(Threads) void select_in_registers(Source source, const Job job) {
  using Number = typename Source::Number;
  struct alignas(4 * sizeof(Number)) Four {
    Number x[4];
  };
  constexpr int kFours = kEach / 4;
  using Kth = KthKey<Source, Cluster, Threads, true>;
  extern __shared__ __align__(16) unsigned shared[];
  if constexpr (Source::kPasses > 0) Kth::open();
  clear_histograms<Source>(shared);
  wait_for_predecessor();
  release_successor();
  if constexpr (Source::kPasses > 0) Kth::meet();
  const std::int64_t list = blockIdx.x / Cluster;
  source.begin(list, shared + Source::kPasses * kBins);
  int k = 0;
  if constexpr (Source::kPasses > 0) k = source.wanted(job, list);
  const Part<Cluster> part(job, source.length(job, list), 4 * Threads);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned sampled = sampled_key(source, list, part.length);
  const int fours = part.share / (4 * Threads);
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
  Range range;  // while the numbers are on their way
  if constexpr (Source::kPasses > 0) range = first_range<Source, Threads>(source, sampled, k, part.length);
  unsigned keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = first + i / 4 * 128 + i % 4;
    keys[i] = i / 4 < fours && at < part.end ? source.key(list, at, numbers[i / 4].x[i % 4]) : 0;
  }
  __syncthreads();
  Found found;
  if constexpr (Source::kPasses == 0) {
    found.exceed = source.exceed(list);
  } else {
    if (k > 0) {
      found = Kth::find(k, part.rank, range, shared, [&](auto add) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) add(keys[i]);
      });
    }
  }
  Kind above, ties;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    above.bits |= keys[i] > found.exceed ? 1u << i : 0u;
    ties.bits |= found.wanted > 0 && keys[i] == found.exceed ? 1u << i : 0u;
  }
  above.count(), ties.count();
  unsigned all;
  const unsigned earlier = before_warp<Threads>(above.warp + (ties.warp << 16), &all);
  if constexpr (Source::kPasses == 0)
    found = count_all<Cluster>(found.exceed, part.rank, static_cast<int>(all & 0xffff));
  const int above_before = found.above + static_cast<int>(earlier & 0xffff);
  const int ties_before =
      found.ties + static_cast<int>(earlier >> 16) - skipped_ties(source, job, list, part.rank, found);
  std::int32_t* const rows = job.rows + list * job.capacity;
  const auto capacity = static_cast<int>(min(job.capacity, std::int64_t{1} << 30));
  for (unsigned left = above.bits | ties.bits; left != 0; left &= left - 1) {
    const int at = __ffs(static_cast<int>(left)) - 1;
    const int tie = ties_before + ties.before(at), place = above_before + above.before(at) + max(0, tie);
    if (tie >= 0 || (above.bits >> at & 1) != 0)
      source.put(rows, capacity, place, first + at / 4 * 128 + at % 4, (ties.bits >> at & 1) != 0, tie);
  }
  if (part.rank == 0) source.put_rest(rows, capacity);
  if constexpr (Source::kPasses == 0) Together<Cluster>::sync();  // the others have read this block's count
}

/// Lists of any length.
template <class Source, int Cluster>
__global__ __launch_bounds__(kSelectThreads) void select_kernel(Source source, const Job job) {
  using Kth = KthKey<Source, Cluster, kSelectThreads, false>;
  extern __shared__ __align__(16) unsigned shared[];
  if constexpr (Source::kPasses > 0) Kth::open();
  wait_for_predecessor();
  release_successor();
  if constexpr (Source::kPasses > 0) Kth::meet();
  unsigned* const held = shared + Source::kPasses * kBins;
  const std::int64_t list = blockIdx.x / Cluster;
  source.begin(list, held);
  const Part<Cluster> part(job, source.length(job, list), kSelectThreads);
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  const typename Source::Number* const numbers = source.row(list);
  const unsigned sampled = sampled_key(source, list, part.length);
  const bool hold = Source::kPasses > 0 && part.share <= job.held;
  clear_histograms<Source>(shared);
  if (hold) {
#pragma unroll 4
    for (int i = part.begin + tid; i < part.end; i += kSelectThreads)
      held[i - part.begin] = source.key(list, i, numbers[i]);
  }
  __syncthreads();
  const auto key = [&](int i) { return hold ? held[i - part.begin] : source.key(list, i, numbers[i]); };
  Found found;
  if constexpr (Source::kPasses == 0) {
    found.exceed = source.exceed(list);
  } else {
    const int k = source.wanted(job, list);
    if (k > 0) {
      const Range range = first_range<Source, kSelectThreads>(source, sampled, k, part.length);
      found = Kth::find(k, part.rank, range, shared, [&](auto add) {
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
  const int per_warp = part.share / (kSelectThreads / 32), from = part.begin + tid / 32 * per_warp;
  const int to = min(part.end, from + per_warp);
  unsigned above = 0, ties = 0;
#pragma unroll 8
  for (int i = from + lane; i < to; i += 32) {
    const unsigned x = key(i);
    above += x > found.exceed;
    ties += found.wanted > 0 && x == found.exceed;
  }
  unsigned all_above, all_ties;
  const unsigned above_earlier = before_warp<kSelectThreads>(__reduce_add_sync(~0u, above), &all_above);
  const unsigned ties_earlier = before_warp<kSelectThreads>(__reduce_add_sync(~0u, ties), &all_ties);
  if constexpr (Source::kPasses == 0)
    found = count_all<Cluster>(found.exceed, part.rank, static_cast<int>(all_above));
  const int skipped = skipped_ties(source, job, list, part.rank, found);
  const auto capacity = static_cast<int>(min(job.capacity, std::int64_t{1} << 30));
  std::int32_t* const rows = job.rows + list * job.capacity;
  int above_before = found.above + static_cast<int>(above_earlier);
  int ties_before = found.ties + static_cast<int>(ties_earlier);
#pragma unroll 4
  for (int i = from; i < to; i += 32) {
    const unsigned x = i + lane < to ? key(i + lane) : 0, lower = (1u << lane) - 1;
    const bool is_tie = found.wanted > 0 && x == found.exceed;
    const unsigned aboves = __ballot_sync(~0u, x > found.exceed), equals = __ballot_sync(~0u, is_tie);
    const int tie = ties_before + __popc(equals & lower) - skipped;
    const int place = above_before + __popc(aboves & lower) + max(0, tie);
    if (x > found.exceed || (is_tie && tie >= 0)) source.put(rows, capacity, place, i + lane, is_tie, tie);
    above_before += __popc(aboves);
    ties_before += __popc(equals);
  }
  if (part.rank == 0) source.put_rest(rows, capacity);
  if constexpr (Source::kPasses == 0) Together<Cluster>::sync();  // the others have read this block's count
}

/// Clusters of sixteen that run at once.
template <class Source>
int wide_clusters_at_once(int shared) {
  const auto kernel = select_in_registers<Source, kWideCluster, kWideThreads>;
  static PerDevice<int> count;
  return count.get([=] {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess)
      return 0;
    return EarlyLaunch({kWideCluster, 1, 1}, kWideThreads, shared, kWideCluster, nullptr)
        .clusters_at_once(kernel);
  });
}

template <class Source>
void run(const Source& source, Job job, std::int64_t lists, StreamHandle stream) {
  if (lists == 0) return;
  const int histograms = Source::kPasses * kBins * 4, fixed = histograms + 4 * job.map_words;
  const auto in_registers = [&]<int Cluster, int Threads>() {
    launch_together<Cluster, Threads>(select_in_registers<Source, Cluster, Threads>, lists, fixed, stream,
                                      source, job);
  };
  const auto share = [&](int cluster) {
    const std::int64_t all = std::int64_t{cluster} * kSelectThreads;
    return (job.n + all - 1) / all * kSelectThreads;
  };
  const auto holds = [&](int cluster) { return share(cluster) <= std::int64_t{kEach} * kSelectThreads; };
  const auto launch = [&]<int Cluster>() {
    if (holds(Cluster)) return in_registers.template operator()<Cluster, kSelectThreads>();
    const auto kernel = select_kernel<Source, Cluster>;
    static const std::int64_t fits = (shared_bytes_per_block(kernel) - histograms) / 4;  // asked once
    job.held = static_cast<int>(Source::kPasses > 0 && share(Cluster) <= fits ? share(Cluster) : 0);
    launch_together<Cluster, kSelectThreads>(
        kernel, lists, histograms + 4 * std::max(job.held, job.map_words), stream, source, job);
  };
  // Blocks of a cluster wait for one another some four times; one that holds all numbers waits for nobody.
  if (!has_clusters() || holds(1)) return launch.template operator()<1>();
  constexpr std::int64_t kWide = std::int64_t{kWideCluster} * kWideThreads * kEach;
  if (job.n <= kWide && wide_clusters_at_once<Source>(fixed) >= lists)
    return in_registers.template operator()<kWideCluster, kWideThreads>();
  // Many lists take few blocks each, so that all run at once.
  int cluster = 2;
  while (cluster < kCluster && (!holds(cluster) || 2 * cluster * lists <= processors())) cluster *= 2;
  if (cluster == 2) return in_registers.template operator()<2, kSelectThreads>();
  if (cluster == 4) return in_registers.template operator()<4, kSelectThreads>();
  launch.template operator()<kCluster>();
}

}  // namespace

std::int64_t select_workspace_bytes(std::int64_t, std::int64_t) {
  return 16;  // selections work in shared memory
}

void top_k(const float* scores, std::int64_t lists, std::int64_t n, const std::int32_t* lengths,
           const std::int32_t* k, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, void*,
           StreamHandle stream) {
  run(FloatKeys{{}, scores, n},
      {.n = n, .capacity = capacity, .lengths = lengths, .k = k, .rows = rows, .counts = counts}, lists,
      stream);
}

void top_pages(const float* scores, std::int64_t lists, std::int64_t n, const PageRule& rule,
               std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, StreamHandle stream) {
  run(PageKeys(scores, n, rule), {.n = n, .capacity = capacity, .rows = rows, .counts = counts}, lists,
      stream);
}

void counting_select(const std::uint16_t* scores, int levels, bool all_ties, std::int64_t lists,
                     std::int64_t n, const std::int32_t* lengths, const std::int32_t* k, std::int32_t* rows,
                     std::int64_t capacity, std::int32_t* counts, void*, StreamHandle stream) {
  const CountingJob counting = {.scores = scores,
                                .levels = levels,
                                .all_ties = all_ties,
                                .n = n,
                                .capacity = capacity,
                                .lengths = lengths,
                                .k = k,
                                .rows = rows,
                                .counts = counts};
  if (counting_select_in_cluster(counting, lists, stream)) return;
  run(LevelKeys{{}, scores, n, levels - 1},
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
  run(ThresholdKeys{{}, scores, threshold, n},
      {.n = n, .capacity = capacity, .lengths = lengths, .rows = rows, .counts = counts}, lists, stream);
}

void buckets_to_rows(const std::int32_t* chosen, int probes, const std::int32_t* labels, int kv_heads,
                     int buckets, std::int64_t lists, std::int64_t n, const std::int32_t* begin,
                     const std::int32_t* end, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts,
                     void*, StreamHandle stream) {
  run(BucketKeys{{}, chosen, labels, begin, probes, kv_heads, buckets, n},
      {.n = n,
       .capacity = capacity,
       .lengths = end,
       .rows = rows,
       .counts = counts,
       .map_words = (buckets + 31) / 32},
      lists, stream);
}

}  // namespace lode::cuda
