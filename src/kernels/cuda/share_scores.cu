// SPDX-License-Identifier: Apache-2.0
// Work map of share_kernel: grid (pieces of the keys, KV heads x query tokens); every block adds up the sums
// of exponentials that the scorer has left, and a thread then takes kEach keys.
#include <cfloat>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/exponential_sum.cuh"
#include "kernels/cuda/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kEach = 8, kMostGroup = 16;

__global__ void __launch_bounds__(kThreads)
    share_kernel(const float* scores, const ExponentialSum* sums, const __grid_constant__ Queries in,
                 std::int64_t sink, std::int64_t window, std::int64_t max_tokens, float* shared) {
  __shared__ float log_sums[kMostGroup];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int group = in.query_heads / in.layout.kv_heads;
  const std::int64_t list = blockIdx.y, first = std::int64_t{blockIdx.x} * kThreads * kEach,
                     end = in.tokens[list / in.layout.kv_heads].position + 1 - window;
  wait_for_predecessor();
  release_successor();
  if (first >= end) return;
  const std::int64_t parts = sums_of_keys(end), stride = sums_of_keys(max_tokens);
  for (int g = thread / 32; g < group; g += kThreads / 32) {
    const ExponentialSum* const of = sums + (list * group + g) * stride;
    ExponentialSum mine;
    for (std::int64_t i = lane; i < parts; i += 32) {
      const ExponentialSum one = of[i];
      const float peak = fmaxf(mine.peak, one.peak);
      mine = {peak, sum_below(mine, peak) + sum_below(one, peak)};
    }
    const ExponentialSum all = merge_lanes<1>(mine);
    if (lane == 0) log_sums[g] = all.peak > -INFINITY ? all.peak + logf(all.sum) : 0.0f;
  }
  __syncthreads();
  float weights[kEach] = {};
  for (int g = 0; g < group; ++g) {
    const float* const row = scores + (list * group + g) * max_tokens + first + thread;
    const float log_sum = log_sums[g];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float score = first + thread + i * kThreads < end ? row[i * kThreads] : -INFINITY;
      if (score > -INFINITY) weights[i] += __expf(score - log_sum);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int64_t key = first + thread + i * kThreads;
    if (key < end)
      shared[list * max_tokens + key] = key < sink ? -INFINITY : logf(fmaxf(weights[i], FLT_MIN));
  }
}

}  // namespace

void share_scores(const float* scores, const ExponentialSum* sums, const Queries& queries, std::int64_t sink,
                  std::int64_t window, std::int64_t max_tokens, float* shared, StreamHandle stream) {
  if (queries.count == 0 || max_tokens <= window) return;
  constexpr std::int64_t kKeys = std::int64_t{kThreads} * kEach;
  const dim3 grid(static_cast<unsigned>((max_tokens - window + kKeys - 1) / kKeys),
                  static_cast<unsigned>(queries.count * queries.layout.kv_heads));
  EarlyLaunch(grid, kThreads, 0, 1, stream)(share_kernel, scores, sums, queries, sink, window, max_tokens,
                                            shared);
}

}  // namespace lode::cuda
