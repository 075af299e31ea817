// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128;

// A NaN on either side stays out of the peak and reaches the output through its weight.
__global__ void merge_kernel(float* output, const float* lse, const float* other, const float* other_lse,
                             int d) {
  const std::int64_t row = blockIdx.x;
  const float mine = lse[row], theirs = other_lse[row];
  if (theirs == -INFINITY) return;
  const float peak = fmaxf(mine, theirs);
  const float a = mine == -INFINITY ? 0.0f : expf(mine - peak), b = expf(theirs - peak), sum = a + b;
  for (int i = threadIdx.x; i < d; i += kThreads) {
    float& x = output[row * d + i];
    x = (a == 0.0f ? 0.0f : x * (a / sum)) + other[row * d + i] * (b / sum);
  }
}

__global__ void sinks_kernel(float* output, float* lse, const float* sinks, int heads, int d) {
  const std::int64_t row = blockIdx.x;
  const float sink = sinks[row % heads];
  release_successor();
  wait_for_predecessor();
  if (sink == -INFINITY) return;
  const float mine = lse[row], peak = fmaxf(mine, sink);
  const float a = mine == -INFINITY ? 0.0f : expf(mine - peak), sum = a + expf(sink - peak);
  for (int i = threadIdx.x; i < d; i += kThreads) {
    float& x = output[row * d + i];
    x = a == 0.0f ? 0.0f : x * (a / sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) lse[row] = peak + logf(sum);
}

struct Parts {
  StatePart at[kMostMerged];
  int count = 0;
};

// A part whose lse is NaN makes the row NaN.
__global__ void merge_parts_kernel(const __grid_constant__ Parts parts, int d, float* to, float* to_lse) {
  const std::int64_t row = blockIdx.x;
  float peak = -INFINITY, sum = 0.0f;
  for (int p = 0; p < parts.count; ++p) peak = fmaxf(peak, parts.at[p].lse[row]);
  const float base = peak == -INFINITY ? 0.0f : peak;
  for (int p = 0; p < parts.count; ++p) sum += expf(parts.at[p].lse[row] - base);
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
    float x = 0.0f;
    for (int p = 0; p < parts.count; ++p) {
      const float own = parts.at[p].lse[row];
      if (own != -INFINITY) x += expf(own - base) / sum * parts.at[p].output[row * d + i];
    }
    to[row * d + i] = x;
  }
  __syncthreads();  // to_lse may be one of those that were read
  if (to_lse != nullptr && threadIdx.x == 0) to_lse[row] = base + logf(sum);
}

constexpr int kMostPlanes = 16;

struct Merged {
  StatePlanes planes;
  StatePart parts[3];
  int count = 0;
};

// A part whose lse is NaN makes the row NaN. kMost: of planes; with none a thread needs few registers, and
// all rows of a step run at once.
template <int kMost>
__global__ void __launch_bounds__(kThreads)
    merge_planes_kernel(const Merged m, int d, float* to, const SplitResult split) {
  constexpr int kParts = kMost + 3;
  __shared__ float lse[kParts], weight[kParts];
  release_successor();  // which fetches weights meanwhile, and waits for what is merged here
  const std::int64_t row = blockIdx.x, rows = gridDim.x;
  const int thread = static_cast<int>(threadIdx.x), all = m.planes.count + m.count;
  const auto from = [&](int p) {
    return p < m.planes.count ? m.planes.outputs + (p * rows + row) * d
                              : m.parts[p - m.planes.count].output + row * d;
  };
  float own = -INFINITY, x[kParts];  // of the first columns, on their way before the weights are known
  if (thread < all)
    own = thread < m.planes.count ? m.planes.lse[thread * rows + row]
                                  : m.parts[thread - m.planes.count].lse[row];
#pragma unroll
  for (int p = 0; p < kParts; ++p) x[p] = p < all && thread < d ? from(p)[thread] : 0.0f;
  if (thread < kParts) lse[thread] = own;
  __syncthreads();
  if (thread < kParts) {
    float peak = -INFINITY, sum = 0.0f;
#pragma unroll
    for (const float other : lse) peak = fmaxf(peak, other);
    const float base = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
    for (const float other : lse) sum += expf(other - base);
    weight[thread] = own == -INFINITY ? 0.0f : expf(own - base) / sum;
  }
  __syncthreads();
  for (int i = thread; i < d; i += kThreads) {
    float result = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (p < all && i != thread) x[p] = from(p)[i];
      if (weight[p] != 0.0f) result += weight[p] * x[p];  // what an empty part holds is no number
    }
    to[row * d + i] = result;
    if (split.to == nullptr) continue;
    auto* const half = static_cast<__nv_bfloat16*>(split.to) + row * d + i;  // rows of a token are its heads
    const __nv_bfloat16 high = __float2bfloat16_rn(result);
    *half = high;
    half[split.low] = __float2bfloat16_rn(result - __bfloat162float(high));
  }
}

}  // namespace

void merge_planes(const StatePlanes& planes, const StatePart (&parts)[3], int count, std::int64_t rows, int d,
                  float* to, const SplitResult& split, StreamHandle stream) {
  if (rows == 0) return;
  if (planes.count > kMostPlanes || count > 3) throw RunError("expected at most 16 planes and three states");
  const auto kernel = planes.count == 0 ? merge_planes_kernel<0> : merge_planes_kernel<kMostPlanes>;
  Launch(static_cast<unsigned>(rows), kThreads, 0, stream)(
      kernel, {planes, {parts[0], parts[1], parts[2]}, count}, d, to, split);
}

void merge_parts(std::span<const StatePart> parts, std::int64_t rows, int d, float* to, float* to_lse,
                 StreamHandle stream) {
  if (rows == 0) return;
  if (parts.size() > kMostMerged) throw RunError("expected at most 16 parts");
  Parts all;
  for (const StatePart& part : parts) all.at[all.count++] = part;
  Launch(static_cast<unsigned>(rows), kThreads, 0, stream)(merge_parts_kernel, all, d, to, to_lse);
}

void merge_parts(const float* outputs, const float* lse, int parts, std::int64_t rows, int d, float* to,
                 float* to_lse, StreamHandle stream) {
  StatePart each[kMostMerged];
  for (int p = 0; p < std::min(parts, kMostMerged); ++p) each[p] = {outputs + p * rows * d, lse + p * rows};
  merge_parts({each, static_cast<std::size_t>(parts)}, rows, d, to, to_lse, stream);
}

void merge_sinks(float* output, float* lse, const float* sinks, std::int64_t rows, int heads, int d,
                 StreamHandle stream) {
  if (rows == 0) return;
  EarlyLaunch(dim3(static_cast<unsigned>(rows)), kThreads, 0, 1, stream)(sinks_kernel, output, lse, sinks,
                                                                         heads, d);
}

void merge_states(float* output, const float* lse, const float* other, const float* other_lse,
                  std::int64_t rows, int d, StreamHandle stream) {
  if (rows == 0) return;
  Launch(static_cast<unsigned>(rows), kThreads, 0, stream)(merge_kernel, output, lse, other, other_lse, d);
}

}  // namespace lode::cuda
