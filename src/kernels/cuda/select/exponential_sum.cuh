// SPDX-License-Identifier: Apache-2.0
// Sums of exponentials that a kernel takes of the scores it makes, for share_scores (select.h).
#pragma once

#include "kernels/cuda/select/select.h"

namespace lode::cuda {

/// The grid of a scorer: pieces of kKeysOfSum keys, KV heads x chunks of their heads, query tokens.
inline dim3 scorer_grid(const Queries& queries, std::int64_t keys, int chunks) {
  return {static_cast<unsigned>(sums_of_keys(keys)), static_cast<unsigned>(queries.layout.kv_heads * chunks),
          static_cast<unsigned>(queries.count)};
}

/// NaN and infinities count nothing.
__device__ __forceinline__ void add_to(ExponentialSum& to, float x) {
  if (!(fabsf(x) < INFINITY)) return;
  if (x > to.peak) {
    to.sum = to.sum * __expf(to.peak - x) + 1.0f;
    to.peak = x;
  } else {
    to.sum += __expf(x - to.peak);
  }
}
/// The sum with another peak, the higher one of several.
__device__ __forceinline__ float sum_below(const ExponentialSum& of, float peak) {
  return of.peak > -INFINITY ? of.sum * __expf(of.peak - peak) : 0.0f;
}

/// A number of the order of the float whose bits these are, no NaN; and back.
__device__ __forceinline__ int rising(int bits) {
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

/// All lanes whose numbers differ in bits from kFrom on get what these have together.
template <int kFrom>
__device__ __forceinline__ ExponentialSum merge_lanes(const ExponentialSum& mine) {
  float peak = mine.peak;
  if constexpr (kFrom == 1) {
    const int order = __reduce_max_sync(~0u, rising(__float_as_int(peak)));
    peak = __int_as_float(rising(order));
  } else {
#pragma unroll
    for (int o = 16; o >= kFrom; o /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
  }
  float sum = sum_below(mine, peak);
#pragma unroll
  for (int o = 16; o >= kFrom; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return {peak, sum};
}

/// Writes what a block's threads have together of each of its first `heads` heads: a lane has kEach of them,
/// from head lane % kBeside * kEach on. By all threads, whose number is kThreads.
template <int kThreads, int kBeside, int kEach>
__device__ __forceinline__ void post_sums(const ExponentialSum (&mine)[kEach], int heads, ExponentialSum* to,
                                          std::int64_t stride) {
  constexpr int kWarps = kThreads / 32, kHeads = kBeside * kEach;
  __shared__ ExponentialSum of_warps[kWarps][kHeads];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  __syncthreads();  // of an earlier call everything has been read
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const ExponentialSum all = merge_lanes<kBeside>(mine[e]);
    if (lane < kBeside) of_warps[thread / 32][lane * kEach + e] = all;
  }
  __syncthreads();
  if (thread >= kHeads || thread >= heads) return;
  ExponentialSum all;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all.peak = fmaxf(all.peak, of_warps[w][thread].peak);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all.sum += sum_below(of_warps[w][thread], all.peak);
  to[thread * stride] = all;
}

/// The same of scorers that give a thread keys first, first + kThreads, ...: what sums hold of far keys.
template <int kThreads, int kKeys, int kHeads>
__device__ __forceinline__ void post_block_sums(const float (&sums)[kKeys][kHeads], std::int64_t first,
                                                std::int64_t sink, std::int64_t end, int heads,
                                                ExponentialSum* to, std::int64_t stride) {
  ExponentialSum mine[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float far[kKeys];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const std::int64_t key = first + k * kThreads;
      const bool counts = key >= sink && key < end && fabsf(sums[k][h]) < INFINITY;
      far[k] = counts ? sums[k][h] : -INFINITY;
      mine[h].peak = fmaxf(mine[h].peak, far[k]);
    }
#pragma unroll
    for (int k = 0; k < kKeys; ++k)
      if (far[k] > -INFINITY) mine[h].sum += __expf(far[k] - mine[h].peak);
  }
  post_sums<kThreads, 1, kHeads>(mine, heads, to, stride);
}

}  // namespace lode::cuda
