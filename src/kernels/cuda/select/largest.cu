// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/select/largest.h"
#include "kernels/cuda/select/select.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 1024;

// Where fewer than k scores count for something, all of them are chosen and the first n - k of the others are
// left out: one block writes every index but those.
__global__ void __launch_bounds__(kThreads) fill_kernel(const float* scores, std::int64_t n, std::int32_t k,
                                                        const std::int32_t* chosen, std::int32_t* rows) {
  if (*chosen >= k) return;
  const std::int64_t left_out = n - k;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ int of_warps[kThreads / 32];
  std::int64_t before = 0;  // least scores in front of this stretch
  for (std::int64_t first = 0; first < n; first += kThreads) {
    const std::int64_t at = first + threadIdx.x;
    const bool least = at < n && !(scores[at] > -INFINITY);
    const unsigned in_warp = __ballot_sync(~0u, least);
    if (lane == 0) of_warps[warp] = __popc(in_warp);
    __syncthreads();
    std::int64_t rank = before + __popc(in_warp & ((1u << lane) - 1));
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) rank += of_warps[w];
      before += of_warps[w];
    }
    __syncthreads();
    if (at < n && !(least && rank < left_out)) rows[at - min(rank, left_out)] = static_cast<std::int32_t>(at);
  }
}

}  // namespace

void largest(const float* scores, std::int64_t n, std::int32_t k, std::int32_t* rows, std::int32_t* chosen,
             StreamHandle stream) {
  top_k(scores, 1, n, nullptr, nullptr, rows, k, chosen, nullptr, stream);
  Launch(1, kThreads, 0, stream)(fill_kernel, scores, n, k, chosen, rows);
}

}  // namespace lode::cuda
