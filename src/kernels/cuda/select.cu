// SPDX-License-Identifier: Apache-2.0
// Exact selection. A cluster of eight blocks takes a list, or of fewer where lists are many and short: every
// block holds its share of the keys (scores as unsigned numbers of the same order) in registers, those of
// longer lists in shared memory; histograms of 8 bits, added up over the cluster, find the k-th largest key;
// a count and a prefix sum then give every chosen entry its place, so that rows rise and the bits never
// depend on timing. Threshold and bucket selections are the last step alone. Where an entry is a page, its
// place is that of its keys.
#include <algorithm>

#include "kernels/cuda/load.cuh"
#include "kernels/cuda/processors.h"
#include "kernels/cuda/scan.cuh"
#include "kernels/cuda/select.h"
#include "kernels/cuda/select_cluster.cuh"

namespace lode::cuda {

namespace {

constexpr int kBins = 256;
constexpr int kEach = 16;  // keys that a thread holds in registers

/// Rises with x; -0 as 0; NaN gives 0.
__device__ __forceinline__ unsigned ordered(float x) {
  if (x != x) return 0;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Job {
  std::int64_t n = 0, capacity = 0;
  const std::int32_t *lengths = nullptr, *k = nullptr;
  std::int32_t *rows = nullptr, *counts = nullptr;
  bool all_ties = false;
  int held = 0;       ///< keys that a block holds in shared memory
  int map_words = 0;  ///< of shared memory for the source
};

/// What sources have in common whose entries are the rows.
struct Entries {
  static constexpr bool kRanksLast = false;  ///< whether the last in rank must be known where all are chosen
  __device__ void begin(std::int64_t, unsigned*) {}
  __device__ std::int64_t length(const Job& job, std::int64_t list) const {
    return job.lengths == nullptr ? job.n : job.lengths[list];
  }
  __device__ int wanted(const Job& job, std::int64_t list) const {
    return static_cast<int>(min(static_cast<std::int64_t>(load_here(job.k + list)), job.capacity));
  }
  __device__ static int rows_of(int chosen) { return chosen; }
  /// Writes the rows of a chosen entry: the `place`-th, the `tie`-th of those that tie with the last in rank
  /// or, where it is above them, the one that so many of them precede.
  __device__ static void put(std::int32_t* rows, int capacity, int place, int entry, bool, int) {
    if (place < capacity) rows[place] = entry;
  }
  /// Writes what comes behind all entries, as one of the threads of a block.
  __device__ static void put_rest(std::int32_t*, int) {}
};

/// Sources of keys: numbers in rows, key(list, i, number). Key 0 is never chosen; passes() of 8 bits from
/// shift() find the k-th, at most kPasses, none where the key that must be exceeded is known. All digits are
/// below 2 pairs().
struct FloatKeys : Entries {
  using Number = float;
  static constexpr int kPasses = 4;
  const float* scores;
  std::int64_t n;
  __device__ static int passes() { return kPasses; }
  __device__ static int pairs() { return kBins / 2; }
  __device__ static int shift(int pass) { return 24 - 8 * pass; }
  __device__ const float* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const {
    return x == -INFINITY ? 0 : ordered(x);
  }
};
/// Pages, all of which can be chosen: NaN and -inf come last. As add_best_pages (select/page_choice.cc).
struct PageKeys : FloatKeys {
  static constexpr bool kRanksLast = true;
  PageRule rule;
  int pages = 0, chosen = 0;   // whole pages that are far, and how many of them are chosen
  int last = 0, rest = 0;      // keys of the last in rank, and of those behind the pages
  int budget = 0, behind = 0;  // keys in all; row behind the far keys
  PageKeys(const float* s, std::int64_t all, const PageRule& r) : FloatKeys{{}, s, all}, rule(r) {}
  __device__ void begin(std::int64_t list, unsigned*) {
    const std::int64_t query = list / rule.lists_of_query;
    behind = static_cast<int>(rule.tokens[query].position + 1 - rule.window);
    const int far = max(0, behind - static_cast<int>(rule.sink));
    budget = max(0, min(far, load_here(rule.budget + query)));
    pages = far / rule.page;
    rest = min(far % rule.page, budget);
    const int left = budget - rest;
    chosen = (left + rule.page - 1) / rule.page;
    last = left - (chosen - 1) * rule.page;
  }
  __device__ std::int64_t length(const Job& job, std::int64_t) const {
    return min(static_cast<std::int64_t>(pages), job.n);
  }
  __device__ int wanted(const Job&, std::int64_t) const { return chosen; }
  __device__ int rows_of(int) const { return budget; }
  __device__ void put(std::int32_t* rows, int capacity, int place, int page, bool is_tie, int tie) const {
    const bool is_last = is_tie && tie == 0;  // of the lowest score, the oldest: its newest keys
    const int cut = rule.page - last, to = place * rule.page - (tie > 0 ? cut : 0),
              from = static_cast<int>(rule.sink) + page * rule.page + (is_last ? cut : 0),
              count = min(is_last ? last : rule.page, capacity - to);
    for (int i = 0; i < count; ++i) rows[to + i] = from + i;
  }
  __device__ void put_rest(std::int32_t* rows, int capacity) const {
    const int to = budget - rest;
    for (int i = static_cast<int>(threadIdx.x); i < min(rest, capacity - to);
         i += static_cast<int>(blockDim.x))
      rows[to + i] = behind - rest + i;
  }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const {
    return x > -INFINITY ? ordered(x) : 1;
  }
};
struct LevelKeys : Entries {
  using Number = std::uint16_t;
  static constexpr int kPasses = 2;
  const std::uint16_t* scores;
  std::int64_t n;
  int most;  ///< largest score
  __device__ int passes() const { return most + 1 < kBins ? 1 : 2; }
  __device__ int pairs() const { return passes() == 1 ? (most + 1) / 2 + 1 : kBins / 2; }
  __device__ int shift(int pass) const { return passes() == 1 || pass == 1 ? 0 : 3; }  // of 11 bits
  __device__ const std::uint16_t* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, std::uint16_t x) const {
    return static_cast<unsigned>(min(static_cast<int>(x), most)) + 1u;
  }
};
struct ThresholdKeys : Entries {
  using Number = float;
  static constexpr int kPasses = 0;
  const float* scores;
  const float* threshold;
  std::int64_t n;
  __device__ unsigned exceed(std::int64_t list) const {
    const unsigned least = ordered(threshold[list]);
    return least == 0 ? ~0u : least - 1;
  }
  __device__ const float* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const { return ordered(x); }
};
struct BucketKeys : Entries {
  using Number = std::int32_t;
  static constexpr int kPasses = 0;
  const std::int32_t *chosen, *labels, *first;
  int probes, kv_heads, buckets;
  std::int64_t n;
  unsigned* map = nullptr;  // a bit for each bucket
  __device__ void begin(std::int64_t list, unsigned* shared) {
    map = shared;
    const int step = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < (buckets + 31) / 32; i += step) map[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < probes; i += step) {
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

struct Found {
  unsigned exceed = ~0u;            ///< keys above are chosen
  int wanted = 0;                   ///< and so many that are `exceed`
  int all_above = 0, all_ties = 0;  ///< how many there are of both
  int above = 0, ties = 0;          ///< and in earlier blocks
};

/// Inclusive sums of two numbers over a block's threads, in their order.
template <int Threads>
__device__ __forceinline__ uint2 sum_up(uint2 mine, uint2* total) {
  const uint2 lanes = {up_to(mine.x), up_to(mine.y)};
  constexpr unsigned kWarps = Threads / 32;
  __shared__ uint2 sums[kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 31) sums[warp] = lanes;
  __syncthreads();
  const uint2 one = lane < kWarps ? sums[lane] : uint2{};
  *total = {__reduce_add_sync(~0u, one.x), __reduce_add_sync(~0u, one.y)};
  return {lanes.x + __reduce_add_sync(~0u, lane < warp ? one.x : 0),
          lanes.y + __reduce_add_sync(~0u, lane < warp ? one.y : 0)};
}

/// How many keys of the cluster, and of its earlier blocks, have the digits 2 pair + 1 (x) and 2 pair (y).
struct Pair {
  uint2 count = {}, earlier = {};
};
/// kNarrow: no block has more than 65535 keys, and two counts are one number: what a pass waits for is how
/// many bytes come from the other blocks.
template <int Cluster, bool kNarrow>
__device__ __forceinline__ Pair read_pair(const unsigned* histogram, unsigned* narrow /*[kBins / 2]*/,
                                          int pair, bool wanted, int rank) {
  using All = Together<Cluster>;
  if constexpr (kNarrow) {
    __syncthreads();
    if (wanted) narrow[pair] = histogram[2 * pair] | histogram[2 * pair + 1] << 16;
  }
  All::sync();
  Pair sum;
  if (!wanted) return sum;
  uint2 of[Cluster];
#pragma unroll
  for (int r = 0; r < Cluster; ++r) {
    if constexpr (kNarrow) {
      const unsigned both = All::of(narrow, r)[pair];
      of[r] = {both >> 16, both & 0xffffu};
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(All::of(histogram, r) + 2 * pair);
      of[r] = {both.y, both.x};
    }
  }
#pragma unroll
  for (int r = 0; r < Cluster; ++r) {
    sum.count.x += of[r].x, sum.count.y += of[r].y;
    if (r < rank) sum.earlier.x += of[r].x, sum.earlier.y += of[r].y;
  }
  return sum;
}

/// The k-th largest key of the cluster's list. `each(f)` calls f with every key of this block; the histograms
/// are zero and stay as they are until the cluster's next barrier. Adding one to a place of shared memory is
/// a single instruction however many lanes of a warp mean the same place: copies would only cost banks.
template <class Source, int Cluster, int Threads, bool kNarrow, class Each>
__device__ __forceinline__ Found find(const Source& source, int k, int rank,
                                      unsigned* histograms /*[kPasses, kBins]*/, Each each) {
  struct Chosen {
    int bin, count, above, earlier, earlier_above;
  };
  __shared__ Chosen chosen;
  __shared__ unsigned narrow[kNarrow ? kBins / 2 * Source::kPasses : 1];
  const int tid = static_cast<int>(threadIdx.x), pair = kBins / 2 - 1 - tid;  // from the top
  unsigned prefix = 0, mask = 0;
  Found found;
  for (int pass = 0; pass < source.passes(); ++pass) {
    const int shift = source.shift(pass);
    unsigned* const histogram = histograms + pass * kBins;
    each([&](unsigned key) {
      if (key != 0 && (key & mask) == prefix) atomicAdd(histogram + (key >> shift & (kBins - 1)), 1u);
    });
    const Pair mine = read_pair<Cluster, kNarrow>(histogram, narrow + (kNarrow ? kBins / 2 * pass : 0), pair,
                                                  pair >= 0 && pair < source.pairs(), rank);
    const uint2 both = {mine.count.x + mine.count.y, mine.earlier.x + mine.earlier.y};
    uint2 all;
    const uint2 to = sum_up<Threads>(both, &all);
    const int total = static_cast<int>(all.x);
    if (Source::kRanksLast ? k > total : k >= total) {
      found.exceed = prefix == 0 ? 0 : prefix - 1;
      found.all_above += total, found.above += static_cast<int>(all.y);
      found.all_ties = found.ties = 0;
      return found;
    }
    const auto choose_if = [&](int bin, unsigned count, unsigned earlier, unsigned above,
                               unsigned earlier_above) {
      if (static_cast<int>(above) < k && k <= static_cast<int>(above + count))
        chosen = {bin, static_cast<int>(count), static_cast<int>(above), static_cast<int>(earlier),
                  static_cast<int>(earlier_above)};
    };
    const uint2 above = {to.x - both.x, to.y - both.y};
    choose_if(2 * pair + 1, mine.count.x, mine.earlier.x, above.x, above.y);
    choose_if(2 * pair, mine.count.y, mine.earlier.y, above.x + mine.count.x, above.y + mine.earlier.x);
    __syncthreads();
    const Chosen here = chosen;
    prefix |= static_cast<unsigned>(here.bin) << shift;
    mask |= static_cast<unsigned>(kBins - 1) << shift;
    k -= here.above;
    found.all_above += here.above, found.above += here.earlier_above;
    found.all_ties = here.count, found.ties = here.earlier;
  }
  found.exceed = prefix, found.wanted = k;
  return found;
}

/// What a block of a list is to do.
template <int Cluster>
struct Part {
  int rank, share, begin, end;  ///< entries [begin, end)

  __device__ Part(const Job& job, std::int64_t asked, int multiple) {
    const int length = static_cast<int>(asked < 0 ? 0 : asked < job.n ? asked : job.n);
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
  extern __shared__ __align__(16) unsigned shared[];
  clear_histograms<Source>(shared);
  wait_for_predecessor();
  release_successor();
  const std::int64_t list = blockIdx.x / Cluster;
  source.begin(list, shared + Source::kPasses * kBins);
  int k = 0;
  if constexpr (Source::kPasses > 0) k = source.wanted(job, list);
  const Part<Cluster> part(job, source.length(job, list), 4 * Threads);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
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
      found = find<Source, Cluster, Threads, true>(source, k, part.rank, shared, [&](auto add) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) add(keys[i]);
      });
    }
    Together<Cluster>::arrive();
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
  if constexpr (Source::kPasses == 0) Together<Cluster>::arrive();
  Together<Cluster>::wait();  // the others have read what they want of this block
}

/// Lists of any length.
template <class Source, int Cluster>
__global__ __launch_bounds__(kSelectThreads) void select_kernel(Source source, const Job job) {
  extern __shared__ __align__(16) unsigned shared[];
  wait_for_predecessor();
  release_successor();
  unsigned* const held = shared + Source::kPasses * kBins;
  const std::int64_t list = blockIdx.x / Cluster;
  source.begin(list, held);
  const Part<Cluster> part(job, source.length(job, list), kSelectThreads);
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
  Found found;
  if constexpr (Source::kPasses == 0) {
    found.exceed = source.exceed(list);
  } else {
    const int k = source.wanted(job, list);
    if (k > 0) {
      found = find<Source, Cluster, kSelectThreads, false>(source, k, part.rank, shared, [&](auto add) {
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
  Together<Cluster>::sync();  // the others have read what they want of this block
}

/// Clusters of sixteen that run at once.
template <class Source>
int wide_clusters_at_once(int shared) {
  const auto kernel = select_in_registers<Source, kWideCluster, kWideThreads>;
  static const bool allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess;
  if (!allowed) return 0;
  static const int count =
      EarlyLaunch({kWideCluster, 1, 1}, kWideThreads, shared, kWideCluster, nullptr).clusters_at_once(kernel);
  return count;
}

template <class Source>
void run(const Source& source, Job job, std::int64_t lists, StreamHandle stream) {
  if (lists == 0) return;
  const int histograms = Source::kPasses * kBins * 4, fixed = histograms + 4 * job.map_words;
  const auto in_registers = [&]<int Cluster, int Threads>() {
    launch_together<Cluster, Threads>(select_in_registers<Source, Cluster, Threads>, lists, fixed, stream,
                                      source, job);
  };
  const auto holds = [&](int cluster) { return job.n <= std::int64_t{kEach} * cluster * kSelectThreads; };
  const auto launch = [&]<int Cluster>() {
    const std::int64_t all = std::int64_t{Cluster} * kSelectThreads;
    if (holds(Cluster)) return in_registers.template operator()<Cluster, kSelectThreads>();
    const std::int64_t share = (job.n + all - 1) / all * kSelectThreads;
    const std::int64_t fits = (shared_bytes_per_block() - histograms) / 4;
    job.held = static_cast<int>(Source::kPasses > 0 && share <= fits ? share : 0);
    launch_together<Cluster, kSelectThreads>(select_kernel<Source, Cluster>, lists,
                                             histograms + 4 * std::max(job.held, job.map_words), stream,
                                             source, job);
  };
  if (!has_clusters()) return launch.template operator()<1>();
  // Blocks of a cluster wait for one another four times; one that holds all numbers waits for nobody.
  if (holds(1)) return in_registers.template operator()<1, kSelectThreads>();
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
