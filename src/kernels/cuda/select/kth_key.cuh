// SPDX-License-Identifier: Apache-2.0
// The k-th largest key of a list that the blocks of a cluster share. Histograms of 256 digits, added up over
// the cluster, narrow the range in which it lies; few keys that are left are sent to all blocks and ranked.
// A sample of the list says where to begin, so that one histogram and one exchange of keys nearly always do;
// where the sample was wrong, or keys tie, further histograms find the same key.
#pragma once

#include "kernels/cuda/device/cta_cluster_mailbox.cuh"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/select/select_cluster.cuh"

namespace lode::cuda::selection {

constexpr int kBins = 256;
constexpr unsigned kLastDigit = kBins - 1;
constexpr int kSample = 128;         // entries that every block looks at beforehand
constexpr int kLeastSampled = 4096;  // entries of a list for which that pays
constexpr int kGathered = 128;       // keys that are ranked by comparing each with all

/// Keys from `first`, `limit` more of them, in digits of 2^shift keys each. The last digit of an open range
/// has all keys above it, too.
struct Range {
  unsigned first = 1, limit = 0;
  int shift = 0;
  bool open = false;

  __device__ static Range closed(unsigned first, unsigned last) {
    const unsigned span = last - first;
    return {first, span, max(0, 24 - __clz(static_cast<int>(span))), false};
  }
  __device__ static Range upward(unsigned first, unsigned last) {
    Range range = closed(first, last);
    range.shift += (range.limit >> range.shift) == kLastDigit;
    return {first, ~0u - first, range.shift, true};
  }
  /// The keys of one digit, none beyond the range's own.
  __device__ Range of(unsigned digit) const {
    const unsigned offset = digit << shift, others = open && digit == kLastDigit ? ~0u : (1u << shift) - 1;
    return closed(first + offset, first + offset + min(others, limit - offset));
  }
  __device__ bool has(unsigned key) const { return key - first <= limit; }
  __device__ unsigned digit(unsigned key) const { return min((key - first) >> shift, kLastDigit); }
  /// Pairs of digits that there are.
  __device__ int pairs() const { return open ? kBins / 2 : static_cast<int>(limit >> shift) / 2 + 1; }
};

struct Found {
  unsigned exceed = ~0u;            ///< keys above are chosen
  int wanted = 0;                   ///< and so many that are `exceed`
  int all_above = 0, all_ties = 0;  ///< how many there are of both
  int above = 0, ties = 0;          ///< and in earlier blocks
};

/// Inclusive sums of two numbers over a block's threads, in their order.
template <int Threads>
__device__ __forceinline__ uint2 sum_up(uint2 mine, uint2* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint2 lanes = {sum_up_to(mine.x, lane), sum_up_to(mine.y, lane)};
  constexpr int kWarps = Threads / 32;
  __shared__ uint2 sums[kWarps];
  if (lane == 31) sums[warp] = lanes;
  __syncthreads();
  const uint2 one = lane < kWarps ? sums[lane] : uint2{};
  *total = {__reduce_add_sync(~0u, one.x), __reduce_add_sync(~0u, one.y)};
  return {lanes.x + __reduce_add_sync(~0u, lane < warp ? one.x : 0),
          lanes.y + __reduce_add_sync(~0u, lane < warp ? one.y : 0)};
}

/// Where the k-th largest of a list's keys may be, by kSample of them, one from each of the first threads:
/// from four standard deviations below its rank in the sample to as many above.
template <int Threads>
__device__ __forceinline__ Range likely_range(unsigned key, int k, int length) {
  __shared__ __align__(16) unsigned keys[kSample];
  __shared__ unsigned ends[2];
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  if (tid < kSample) keys[tid] = key;
  if (tid < 2) ends[tid] = 1;  // 0 is nobody's k-th
  __syncthreads();
  const float share = static_cast<float>(k) / static_cast<float>(length), mean = kSample * share,
              around = 4.0f * sqrtf(mean * (1.0f - share)) + 1.0f;
  const unsigned highest = static_cast<unsigned>(max(0.0f, mean - around)),
                 lowest = static_cast<unsigned>(mean + around);
  const uint4 four = reinterpret_cast<const uint4*>(keys)[lane];
  for (int i = tid / 32; i < kSample; i += Threads / 32) {
    const unsigned mine = keys[i];
    const auto place = [&](unsigned x) { return x > mine ? 1u : x == mine ? 1u << 16 : 0u; };
    const unsigned counts =
        __reduce_add_sync(~0u, place(four.x) + place(four.y) + place(four.z) + place(four.w));
    const unsigned above = counts & 0xffffu, to = above + (counts >> 16);
    if (lane == 0 && above <= lowest && lowest < to) atomicMax(&ends[0], mine);
    if (lane == 0 && above <= highest && highest < to) atomicMax(&ends[1], mine);
  }
  __syncthreads();
  return Range::upward(ends[0], ends[1]);
}

/// The k-th largest key of a list that the blocks of a cluster share. kNarrow: no block has more than 65535
/// keys, and two counts are one word: what a pass waits for is how many bytes come from the other blocks.
template <class Source, int Cluster, int Threads, bool kNarrow>
class KthKey {
 public:
  /// Before anything else, by all threads; meet() before find().
  __device__ static void open() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) {
      Shared& s = shared();
      if (threadIdx.x == 0) {
        open_inbox(&s.of_counts[0]), open_inbox(&s.of_counts[1]), open_inbox(&s.of_keys);
        publish_inboxes();
      }
      __syncwarp();
      arrive_in_cluster();
    }
#endif
  }
  __device__ static void meet() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) wait_for_cluster();
#endif
  }

  /// k > 0, looked for in `range` first. `each(f)` calls f with every key of this block; the histograms are
  /// zero. Adding one to a place of shared memory is a single instruction however many lanes of a warp mean
  /// the same place: copies would only cost banks.
  template <class Each>
  __device__ __forceinline__ static Found find(int k, int rank, Range range,
                                               unsigned* histograms /*[kPasses, kBins]*/, Each each) {
    Shared& s = shared();
    Found found;
    for (int pass = 0;; ++pass) {
      unsigned* const histogram = histograms + pass * kBins;
      each([&](unsigned key) {
        if (range.has(key)) atomicAdd(histogram + range.digit(key), 1u);
      });
      const Pair mine = share_counts(histogram, pass, range.pairs(), rank);
      const uint2 both = {mine.count.x + mine.count.y, mine.earlier.x + mine.earlier.y};
      uint2 all;
      const uint2 to = sum_up<Threads>(both, &all);
      const int total = static_cast<int>(all.x);
      if (Source::kRanksLast ? k > total : k >= total) {  // all of the range, and what is below it
        found.exceed = range.first - 1;
        found.all_above += total, found.above += static_cast<int>(all.y);
        k -= total;
        if (k == 0 || range.first == 1) return found;
        range = Range::closed(1, range.first - 1);
        continue;
      }
      const auto choose_if = [&](int digit, unsigned count, unsigned earlier, unsigned above,
                                 unsigned earlier_above) {
        if (static_cast<int>(above) < k && k <= static_cast<int>(above + count))
          s.digit = {digit, static_cast<int>(count), static_cast<int>(above), static_cast<int>(earlier),
                     static_cast<int>(earlier_above)};
      };
      const uint2 above = {to.x - both.x, to.y - both.y};
      choose_if(2 * pair() + 1, mine.count.x, mine.earlier.x, above.x, above.y);
      choose_if(2 * pair(), mine.count.y, mine.earlier.y, above.x + mine.count.x, above.y + mine.earlier.x);
      __syncthreads();
      const Digit here = s.digit;
      range = range.of(static_cast<unsigned>(here.digit));
      k -= here.above;
      found.all_above += here.above, found.above += here.earlier_above;
      if (range.limit == 0) {
        found.exceed = range.first, found.wanted = k;
        found.all_ties = here.count, found.ties = here.earlier;
        return found;
      }
      if (here.count <= kGathered) return rank_few(range, k, here.count, here.earlier, found, each);
    }
  }

 private:
  static constexpr int kWords = kNarrow ? kBins / 2 : kBins;
  struct Digit {
    int digit, count, above, earlier, earlier_above;
  };
  struct Few {
    unsigned key;
    int above, ties, earlier_above, earlier_ties;
  };
  struct Shared {
    alignas(16) unsigned counts[2][Cluster][kWords];  ///< of each block, by turns
    unsigned own[kGathered], all[kGathered], taken;   ///< few keys, how many this block has
    Digit digit;
    Few few;
    Inbox of_counts[2], of_keys;
  };
  /// How many keys of the cluster, and of its earlier blocks, have the digits 2 pair + 1 (x), 2 pair (y).
  struct Pair {
    uint2 count = {}, earlier = {};
  };
  __device__ static Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  /// From the top.
  __device__ static int pair() {
    return kBins / 2 - 1 - static_cast<int>(threadIdx.x);
  }
  __device__ static unsigned word(const unsigned* histogram, int i) {
    return kNarrow ? histogram[2 * i] | histogram[2 * i + 1] << 16 : histogram[i];
  }
  __device__ static uint2 counts_of(const unsigned* words, int pair) {
    if constexpr (kNarrow) return {words[pair] >> 16, words[pair] & 0xffffu};
    return {words[2 * pair + 1], words[2 * pair]};
  }

  /// This block's counts to all, and theirs summed. A block that sends its third has read everybody's first,
  /// since it has their second.
  __device__ __forceinline__ static Pair share_counts(const unsigned* histogram, int pass, int pairs,
                                                      int rank) {
    Shared& s = shared();
    Pair sum;
    __syncthreads();
    const bool wanted = pair() >= 0 && pair() < pairs;
    if constexpr (Cluster == 1) {
      if (wanted) sum.count = {histogram[2 * pair() + 1], histogram[2 * pair()]};
    } else {
#if __CUDA_ARCH__ >= 900
      const int turn = pass % 2, fours = ((kNarrow ? pairs : 2 * pairs) + 3) / 4,
                lane = static_cast<int>(threadIdx.x) % 32;
      if (threadIdx.x == 0) expect(&s.of_counts[turn], static_cast<unsigned>(Cluster * fours) * 16);
      for (int to = static_cast<int>(threadIdx.x) / 32; to < Cluster; to += Threads / 32) {
        const unsigned inbox = address_in(&s.of_counts[turn], to);
        for (int i = lane; i < fours; i += 32) {
          const uint4 four = {word(histogram, 4 * i), word(histogram, 4 * i + 1), word(histogram, 4 * i + 2),
                              word(histogram, 4 * i + 3)};
          send(address_in(&s.counts[turn][rank][4 * i], to), four, inbox);
        }
      }
      wait_for(&s.of_counts[turn], static_cast<unsigned>(pass / 2 % 2));
      if (wanted) {
#pragma unroll
        for (int r = 0; r < Cluster; ++r) {
          const uint2 one = counts_of(s.counts[turn][r], pair());
          sum.count.x += one.x, sum.count.y += one.y;
          if (r < rank) sum.earlier.x += one.x, sum.earlier.y += one.y;
        }
      }
#endif
    }
    return sum;
  }

  /// The k-th largest of the few keys in `range`, which each block sends to all. `earlier` of the `count`
  /// keys are those of earlier blocks. Adds to what was found above the range.
  template <class Each>
  __device__ __forceinline__ static Found rank_few(const Range& range, int k, int count, int earlier,
                                                   Found found, Each each) {
    Shared& s = shared();
    const int tid = static_cast<int>(threadIdx.x);
    if (tid == 0) s.taken = 0;
    __syncthreads();
    each([&](unsigned key) {
      if (range.has(key)) s.own[atomicAdd(&s.taken, 1u)] = key;
    });
    __syncthreads();
    const unsigned* keys = s.own;
    if constexpr (Cluster > 1) {
#if __CUDA_ARCH__ >= 900
      if (tid == 0) expect(&s.of_keys, static_cast<unsigned>(count) * 4);
      for (int i = tid; i < static_cast<int>(s.taken) * Cluster; i += Threads)
        send(address_in(&s.all[earlier + i / Cluster], i % Cluster), s.own[i / Cluster],
             address_in(&s.of_keys, i % Cluster));
      wait_for(&s.of_keys);
#endif
      keys = s.all;
    }
    if (tid < count) {
      const unsigned key = keys[tid];
      unsigned counts = 0;  // above, and ties in the upper half
      bool is_first = true;
      const auto compare = [&](int begin, int end) {
#pragma unroll 4
        for (int i = begin; i < end; ++i) {
          const unsigned other = keys[i];
          if (i < tid && other == key) is_first = false;
          counts += other > key ? 1u : other == key ? 1u << 16 : 0u;
        }
      };
      compare(0, earlier);
      const unsigned of_earlier = counts;
      compare(earlier, count);
      const int above = static_cast<int>(counts & 0xffffu), ties = static_cast<int>(counts >> 16);
      if (is_first && above < k && k <= above + ties)
        s.few = {key, above, ties, static_cast<int>(of_earlier & 0xffffu),
                 static_cast<int>(of_earlier >> 16)};
    }
    __syncthreads();
    const Few few = s.few;
    found.exceed = few.key, found.wanted = k - few.above;
    found.all_above += few.above, found.above += few.earlier_above;
    found.all_ties = few.ties, found.ties = few.earlier_ties;
    return found;
  }
};

}  // namespace lode::cuda::selection
