// SPDX-License-Identifier: Apache-2.0
// Work map of share_kernel: grid (blocks, KV heads x query tokens), so many blocks as fill the GPU; every
// block adds up the sums of exponentials that the scorer has left, and then takes pieces of the keys, kEach
// of a piece a thread.
#include <algorithm>
#include <cfloat>

#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/select/exponential_sum.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kEach = 4, kMostGroup = 16;
constexpr int kHeads = 4;  // whose scores are under way at once
constexpr int kBlocksOfSm = 4;
constexpr std::int64_t kPiece = kThreads * kEach;

__global__ void __launch_bounds__(kThreads)
    share_kernel(const float* scores, const ExponentialSum* sums, const __grid_constant__ Queries in,
                 std::int64_t sink, std::int64_t window, std::int64_t max_tokens, float* shared) {
  __shared__ float log_sums[kMostGroup];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int group = in.query_heads / in.layout.kv_heads;
  const std::int64_t list = blockIdx.y, end = in.tokens[list / in.layout.kv_heads].position + 1 - window;
  wait_for_predecessor();
  release_successor();
  if (blockIdx.x * kPiece >= end) return;
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
  for (std::int64_t key = blockIdx.x * kPiece + thread; key < end; key += gridDim.x * kPiece) {
    const float* const first = scores + list * group * max_tokens + key;
    float weights[kEach] = {};
    for (int from = 0; from < group; from += kHeads) {
      float score[kHeads][kEach];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const bool there = from + h < group && key + i * kThreads < end;
          score[h][i] = there ? first[(from + h) * max_tokens + i * kThreads] : -INFINITY;
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float log_sum = log_sums[min(from + h, group - 1)];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (score[h][i] > -INFINITY) weights[i] += __expf(score[h][i] - log_sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t at = key + i * kThreads;
      if (at < end) shared[list * max_tokens + at] = at < sink ? -INFINITY : logf(fmaxf(weights[i], FLT_MIN));
    }
  }
}

}  // namespace

void share_scores(const float* scores, const ExponentialSum* sums, const Queries& queries, std::int64_t sink,
                  std::int64_t window, std::int64_t max_tokens, float* shared, StreamHandle stream) {
  if (queries.count == 0 || max_tokens <= window) return;
  const std::int64_t lists = std::int64_t{queries.count} * queries.layout.kv_heads,
                     pieces = (max_tokens - window + kPiece - 1) / kPiece,
                     fill = std::max<std::int64_t>(1, kBlocksOfSm * processors() / lists);
  const dim3 grid(static_cast<unsigned>(std::min(pieces, fill)), static_cast<unsigned>(lists));
  EarlyLaunch(grid, kThreads, 0, 1, stream)(share_kernel, scores, sums, queries, sink, window, max_tokens,
                                            shared);
}

}  // namespace lode::cuda
