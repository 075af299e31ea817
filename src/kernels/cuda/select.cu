// SPDX-License-Identifier: Apache-2.0
// Exact top-k of long rows of scores.
//
// Work map: a cluster of kCluster blocks for each list (one block where the GPU has no clusters). Each block
// owns a stretch of the list, read once into shared memory when it fits. Three rounds of histograms over 11,
// 11 and 10 bits of the scores' order, summed over the cluster, find the k-th largest; then every warp counts
// what it keeps, and writes it behind what comes before, so that rows rise and nothing depends on timing.
#include <cooperative_groups.h>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/select.h"

namespace lode::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kBins = 2048, kCluster = 8;
constexpr int kMostCached = 40960;  // scores of one block that stay in shared memory

/// Order-preserving: larger scores give larger numbers; 0 for those that may not be chosen (-inf, NaN).
__device__ __forceinline__ unsigned rank_of(float score) {
  if (!(score > -INFINITY)) return 0;
  const unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct TopK {
  const float* scores;  // [lists, n]
  std::int64_t n;
  const std::int32_t* lengths;  // [lists] or null
  const std::int32_t* k;        // [lists]
  std::int32_t* rows;           // [lists, capacity]
  std::int64_t capacity;
  std::int32_t* counts;  // [lists]
  int cached;            // scores that fit into this launch's shared memory
};

/// What the blocks of a cluster show one another.
struct Shared {
  unsigned bins[kBins];
  unsigned kept[2];  // scores above the threshold, and equal to it, in this block's stretch
  unsigned warp_kept[kWarps][2];
  unsigned digit, above, total;
};

template <bool kClusters>
struct Peers {
  __device__ static int rank() {
    if constexpr (kClusters) return static_cast<int>(cg::this_cluster().block_rank());
    return 0;
  }
  __device__ static constexpr int size() { return kClusters ? kCluster : 1; }
  __device__ static void sync() {
    if constexpr (kClusters)
      cg::this_cluster().sync();
    else
      __syncthreads();
  }
  __device__ static const Shared* of(Shared* mine, int rank) {
    if constexpr (kClusters) return cg::this_cluster().map_shared_rank(mine, rank);
    return mine;
  }
};

/// The bin in which the k-th largest lies, counted from the top, and how many lie in bins above it.
template <class P>
__device__ void find_digit(Shared& s, int bins, unsigned k) {
  // Each thread sums two bins over the cluster; thread 0 has the highest.
  const int high = bins - 1 - 2 * static_cast<int>(threadIdx.x);
  unsigned count[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (high - i < 0) continue;
    for (int r = 0; r < P::size(); ++r) count[i] += P::of(&s, r)->bins[high - i];
  }
  unsigned before = count[0] + count[1];
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned other = __shfl_up_sync(0xffffffffu, before, offset);
    if (threadIdx.x % 32 >= offset) before += other;
  }
  if (threadIdx.x % 32 == 31) s.warp_kept[threadIdx.x / 32][0] = before;
  __syncthreads();
  for (int w = 0; w < static_cast<int>(threadIdx.x / 32); ++w) before += s.warp_kept[w][0];
  before -= count[0] + count[1];
  if (threadIdx.x == kThreads - 1) s.total = before + count[0] + count[1];
  for (int i = 0; i < 2; ++i) {
    if (before < k && before + count[i] >= k) s.digit = static_cast<unsigned>(high - i), s.above = before;
    before += count[i];
  }
  P::sync();  // nobody clears its bins before all have read them
}

/// Several loads of 16 bytes in flight where the stretch allows them.
__device__ void load_ranks(const float* scores, int n, unsigned* cache) {
  int done = 0;
  if (reinterpret_cast<std::uintptr_t>(scores) % 16 == 0) {
    done = n / 4 * 4;
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < done; i += kThreads * 4) {
      const float4 x = *reinterpret_cast<const float4*>(scores + i);
      *reinterpret_cast<uint4*>(cache + i) = {rank_of(x.x), rank_of(x.y), rank_of(x.z), rank_of(x.w)};
    }
  }
  for (int i = done + threadIdx.x; i < n; i += kThreads) cache[i] = rank_of(scores[i]);
}

template <bool kClusters>
__global__ void __launch_bounds__(kThreads, 1) top_k_kernel(const TopK p) {
  using P = Peers<kClusters>;
  __shared__ Shared s;
  extern __shared__ __align__(16) unsigned cache[];
  const std::int64_t list = blockIdx.x / P::size();
  const std::int64_t n = p.lengths != nullptr ? p.lengths[list] : p.n;
  // Stretches of whole warps, so that a warp's 32 scores are neighbours.
  const std::int64_t stretch = ((n + P::size() - 1) / P::size() + 31) / 32 * 32;
  const std::int64_t begin = min(n, P::rank() * stretch), mine = min(n, begin + stretch) - begin;
  const float* const scores = p.scores + list * p.n + begin;
  const bool cached = mine <= p.cached;
  const auto rank_at = [&](std::int64_t i) { return cached ? cache[i] : rank_of(scores[i]); };
  if (cached) load_ranks(scores, static_cast<int>(mine), cache);

  unsigned prefix = 0, mask = 0, k = static_cast<unsigned>(max(0, p.k[list]));
  const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
  for (int round = 0; round < 3 && k > 0; ++round) {
    const int bins = 1 << widths[round];
    for (int i = threadIdx.x; i < bins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    for (std::int64_t i = threadIdx.x; i < mine; i += kThreads) {
      const unsigned rank = rank_at(i);
      if (rank != 0 && (rank & mask) == prefix)
        atomicAdd(&s.bins[rank >> shifts[round] & static_cast<unsigned>(bins - 1)], 1u);
    }
    if (threadIdx.x == 0) s.digit = 0, s.above = 0;
    P::sync();
    find_digit<P>(s, bins, k);
    if (round == 0 && s.total < k) {  // fewer than k may be chosen: all of them
      k = 0, prefix = 1;
      break;
    }
    prefix |= s.digit << shifts[round];
    mask |= static_cast<unsigned>(bins - 1) << shifts[round];
    k -= s.above;
    __syncthreads();
  }
  // From here on: all ranks above `prefix` are chosen, and the last k of those equal to it.
  const bool all = prefix == 1 && mask == 0, none = prefix == 0 && mask == 0;
  const auto above = [&](unsigned rank) { return !none && (all ? rank != 0 : rank > prefix); };
  const auto equal = [&](unsigned rank) { return !none && !all && rank == prefix; };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t of_warp = ((mine + kWarps - 1) / kWarps + 31) / 32 * 32;
  const std::int64_t first = min(mine, warp * of_warp), last = min(mine, first + of_warp);
  unsigned count[2] = {};
  for (std::int64_t i = first; i < last; i += 32) {
    const unsigned rank = i + lane < last ? rank_at(i + lane) : 0;
    count[0] += __popc(__ballot_sync(0xffffffffu, i + lane < last && above(rank)));
    count[1] += __popc(__ballot_sync(0xffffffffu, i + lane < last && equal(rank)));
  }
  if (lane == 0) s.warp_kept[warp][0] = count[0], s.warp_kept[warp][1] = count[1];
  __syncthreads();
  if (threadIdx.x < 2) {
    s.kept[threadIdx.x] = 0;
    for (int w = 0; w < kWarps; ++w) s.kept[threadIdx.x] += s.warp_kept[w][threadIdx.x];
  }
  P::sync();
  // Where this warp's stretch begins among all, and how many equal ones there are in the whole list.
  unsigned before[2] = {}, equals = 0, aboves = 0;
  for (int r = 0; r < P::size(); ++r) {
    const Shared* const peer = P::of(&s, r);
    equals += peer->kept[1], aboves += peer->kept[0];
    if (r < P::rank()) before[0] += peer->kept[0], before[1] += peer->kept[1];
  }
  for (int w = 0; w < warp; ++w) before[0] += s.warp_kept[w][0], before[1] += s.warp_kept[w][1];
  const unsigned skipped = equals - min(k, equals);  // of the equal ones, those at lower positions
  for (std::int64_t i = first; i < last; i += 32) {
    const unsigned rank = i + lane < last ? rank_at(i + lane) : 0;
    const bool is_above = i + lane < last && above(rank), is_equal = i + lane < last && equal(rank);
    const unsigned aboves_here = __ballot_sync(0xffffffffu, is_above),
                   equals_here = __ballot_sync(0xffffffffu, is_equal);
    const unsigned lower = (1u << lane) - 1;
    const unsigned nth_above = before[0] + __popc(aboves_here & lower),
                   nth_equal = before[1] + __popc(equals_here & lower);
    const unsigned equals_kept = nth_equal > skipped ? nth_equal - skipped : 0;
    if (is_above || (is_equal && nth_equal >= skipped))
      p.rows[list * p.capacity + nth_above + equals_kept] = static_cast<std::int32_t>(begin + i + lane);
    before[0] += __popc(aboves_here), before[1] += __popc(equals_here);
  }
  if (P::rank() == 0 && threadIdx.x == 0)
    p.counts[list] = static_cast<std::int32_t>(aboves + (equals - skipped));
  P::sync();  // a block's memory must outlive its peers' reads
}

bool has_clusters() {
  static const bool found = [] {
    int device = 0, major = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return found;
}

template <bool kClusters>
void launch_top_k(TopK p, std::int64_t lists, StreamHandle stream) {
  const int blocks = kClusters ? kCluster : 1;
  const std::int64_t stretch = ((p.n + blocks - 1) / blocks + 31) / 32 * 32;
  p.cached = static_cast<int>(std::min<std::int64_t>(stretch, kMostCached));
  static const bool raised = [] {
    LODE_CUDA(cudaFuncSetAttribute(top_k_kernel<kClusters>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kMostCached * 4));
    return true;
  }();
  static_cast<void>(raised);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(lists * blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(p.cached) * 4;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = kClusters ? 1 : 0;
  LODE_CUDA(cudaLaunchKernelEx(&config, top_k_kernel<kClusters>, p));
}

}  // namespace

std::int64_t select_workspace_bytes(std::int64_t, std::int64_t) {
  return 256;
}

void top_k(const float* scores, std::int64_t lists, std::int64_t n, const std::int32_t* lengths,
           const std::int32_t* k, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, void*,
           StreamHandle stream) {
  if (lists == 0) return;
  const TopK p = {.scores = scores,
                  .n = n,
                  .lengths = lengths,
                  .k = k,
                  .rows = rows,
                  .capacity = capacity,
                  .counts = counts,
                  .cached = 0};
  if (has_clusters())
    launch_top_k<true>(p, lists, stream);
  else
    launch_top_k<false>(p, lists, stream);
}

}  // namespace lode::cuda
