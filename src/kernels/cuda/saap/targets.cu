// SPDX-License-Identifier: Apache-2.0
// Work map: looking is one block a query over all its scores; summing is one block a query, one warp a bucket
// at a time; a centroid is one block, one thread a column.
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/saap/targets.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kUnroll = 8;

__device__ __forceinline__ bool is_far(const TargetQuery& q, std::int32_t position) {
  return (position >= q.begin && position < q.first_end) || (position >= q.second_begin && position < q.end);
}

/// The best key so far: the highest score, at the lowest position of equal ones.
struct Best {
  float score = -INFINITY, far = -INFINITY;
  std::int32_t position = 0x7fffffff;
  __device__ __forceinline__ void take(float s, std::int32_t p) {
    if (s > score || (s == score && p < position)) score = s, position = p;
  }
  __device__ __forceinline__ void merge(const Best& other) {
    take(other.score, other.position);
    far = fmaxf(far, other.far);
  }
};

__global__ __launch_bounds__(kThreads) void look_kernel(const float* scores, const TargetQuery* queries,
                                                        const TargetKeys keys, float* most,
                                                        std::int32_t* passes) {
  const TargetQuery q = queries[blockIdx.x];
  const float* row = scores + std::int64_t{blockIdx.x} * keys.stride;
  Best best;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < keys.stride; i += kThreads) {
    const float s = row[i];
    const std::int32_t p = keys.positions[i];
    if (p >= q.look_begin && p < q.look_end) best.take(s, p);
    if (is_far(q, p)) best.far = fmaxf(best.far, s);
  }
  __shared__ Best part[kWarps];
  for (int o = 16; o > 0; o /= 2) {
    Best other;
    other.score = __shfl_xor_sync(~0u, best.score, o);
    other.far = __shfl_xor_sync(~0u, best.far, o);
    other.position = __shfl_xor_sync(~0u, best.position, o);
    best.merge(other);
  }
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) best.merge(part[w]);
  most[blockIdx.x] = best.far;
  const bool found = best.position != 0x7fffffff;
  const bool passed = q.distance < 0 || (found && abs(best.position - q.position) > q.distance);
  passes[blockIdx.x] = passed && best.far > -INFINITY ? 1 : 0;
}

__global__ __launch_bounds__(kThreads) void sum_kernel(const float* scores, const TargetQuery* queries,
                                                       const float* most, const std::int32_t* chosen,
                                                       const TargetKeys keys, float* sums, __half* targets) {
  const std::int64_t which = chosen[blockIdx.x];
  const TargetQuery q = queries[which];
  const float high = most[which];
  const float* row = scores + which * keys.stride;
  float* own = sums + std::int64_t{blockIdx.x} * keys.buckets;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t c = warp; c < keys.buckets; c += kWarps) {
    float sum = 0.0f;
    for (std::int64_t i = keys.offsets[c] + lane; i < keys.offsets[c + 1]; i += 32)
      if (is_far(q, keys.positions[i])) sum += expf(row[i] - high);
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    if (lane == 0) own[c] = sum;
  }
  __syncthreads();
  __shared__ double part[kWarps];
  double total = 0.0;
  for (std::int64_t c = threadIdx.x; c < keys.buckets; c += kThreads) total += own[c];
  for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
  if (lane == 0) part[warp] = total;
  __syncthreads();
  total = 0.0;
  for (int w = 0; w < kWarps; ++w) total += part[w];
  __half* to = targets + std::int64_t{blockIdx.x} * keys.buckets;
  for (std::int64_t c = threadIdx.x; c < keys.buckets; c += kThreads)
    to[c] = __float2half_rn(static_cast<float>(own[c] / total));
}

__global__ void gather_kernel(const float* from, const std::int32_t* rows, std::int64_t count, std::int64_t d,
                              float* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count * d; i += step) {
    const std::int32_t row = rows[i / d];
    to[i] = row < 0 ? 0.0f : from[row * d + i % d];
  }
}

/// `sum` [d] lies in shared memory.
__global__ void update_kernel(const float* x, const std::int32_t* order, const std::int32_t* offsets,
                              std::int64_t d, float* centroids) {
  extern __shared__ float sum[];
  __shared__ double factor;
  const std::int32_t begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
  if (begin == end) return;
  for (std::int64_t j = threadIdx.x; j < d; j += blockDim.x) {
    float total = 0.0f;
    std::int32_t i = begin;
    for (; i + kUnroll <= end; i += kUnroll) {  // loads run ahead of the sums, whose order stays
      float part[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) part[u] = x[order[i + u] * d + j];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) total += part[u];
    }
    for (; i < end; ++i) total += x[order[i] * d + j];
    sum[j] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double square = 0.0;
    for (std::int64_t j = 0; j < d; ++j) square += static_cast<double>(sum[j]) * sum[j];
    factor = !isfinite(square) ? -1.0 : square > 0.0 ? 1.0 / sqrt(square) : 0.0;
  }
  __syncthreads();
  if (factor < 0.0) return;
  for (std::int64_t j = threadIdx.x; j < d; j += blockDim.x)
    centroids[blockIdx.x * d + j] = static_cast<float>(sum[j] * factor);
}

}  // namespace

void look_at_scores(const float* scores, const TargetQuery* queries, std::int64_t count,
                    const TargetKeys& keys, float* most, std::int32_t* passes, StreamHandle stream) {
  if (count == 0) return;
  Launch(static_cast<unsigned>(count), kThreads, 0, stream)(look_kernel, scores, queries, keys, most, passes);
}

void sum_by_bucket(const float* scores, const TargetQuery* queries, const float* most,
                   const std::int32_t* chosen, std::int64_t count, const TargetKeys& keys, float* sums,
                   void* targets, StreamHandle stream) {
  if (count == 0) return;
  Launch(static_cast<unsigned>(count), kThreads, 0, stream)(sum_kernel, scores, queries, most, chosen, keys,
                                                            sums, static_cast<__half*>(targets));
}

void gather_rows(const float* from, const std::int32_t* rows, std::int64_t count, std::int64_t d, float* to,
                 StreamHandle stream) {
  if (count == 0) return;
  const std::int64_t blocks = std::min<std::int64_t>(4096, (count * d + kThreads - 1) / kThreads);
  Launch(static_cast<unsigned>(blocks), kThreads, 0, stream)(gather_kernel, from, rows, count, d, to);
}

void update_centroids(const float* x, const std::int32_t* order, const std::int32_t* offsets,
                      std::int64_t clusters, std::int64_t d, float* centroids, StreamHandle stream) {
  if (clusters == 0) return;
  Launch(static_cast<unsigned>(clusters), 128, static_cast<std::size_t>(d) * sizeof(float), stream)(
      update_kernel, x, order, offsets, d, centroids);
}

}  // namespace lode::cuda
