// SPDX-License-Identifier: Apache-2.0
// What a selection chooses from: sources turn the numbers of a list into keys, unsigned numbers of which the
// largest are chosen and 0 never, and write the rows of a chosen entry.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/load.cuh"
#include "kernels/cuda/device/ordered.cuh"
#include "kernels/cuda/select/select.h"

namespace lode::cuda::selection {

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
    if (job.k == nullptr) return static_cast<int>(job.capacity);
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

/// Sources of keys: numbers in rows, key(list, i, number). At most kPasses over the keys find the k-th, none
/// where the key that must be exceeded is known; largest() is the largest key that there can be.
struct FloatKeys : Entries {
  using Number = float;
  static constexpr int kPasses = 5;       ///< one over what a sample expects, four where it was wrong
  static constexpr bool kSampled = true;  ///< whether a sample tells where the k-th may be
  const float* scores;
  std::int64_t n;
  __device__ static unsigned largest() { return ~0u; }
  __device__ const float* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, float x) const {
    return x == -INFINITY ? 0 : ordered(x);
  }
};
/// Pages, all of which can be chosen: NaN and -inf come last. As add_best_pages (select/baselines/page_choice.cc).
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
  static constexpr bool kSampled = false;
  const std::uint16_t* scores;
  std::int64_t n;
  int most;  ///< largest score
  __device__ unsigned largest() const { return static_cast<unsigned>(most) + 1u; }
  __device__ const std::uint16_t* row(std::int64_t list) const { return scores + list * n; }
  __device__ __forceinline__ unsigned key(std::int64_t, int, std::uint16_t x) const {
    return static_cast<unsigned>(min(static_cast<int>(x), most)) + 1u;
  }
};
struct ThresholdKeys : Entries {
  using Number = float;
  static constexpr int kPasses = 0;
  static constexpr bool kSampled = false;
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
  static constexpr bool kSampled = false;
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

}  // namespace lode::cuda::selection
