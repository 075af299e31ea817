// SPDX-License-Identifier: Apache-2.0
// Scores of every far key.
//
// Work map of score_kernel: grid (blocks of kThreads keys, KV heads, query tokens); a thread owns one key and
// reads its row once for all heads of the group, whose queries lie in shared memory. share_kernel: a block
// per (query token, KV head).
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/select.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kMostGroup = 16, kShareThreads = 1024;

template <class T>
__global__ void score_kernel(Queries queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                             float* scores) {
  extern __shared__ float q[];  // [group, d] scaled
  const int group = queries.query_heads / queries.layout.kv_heads, d = queries.layout.head_dim;
  const int query = blockIdx.z, kv_head = blockIdx.y;
  const QueryToken token = queries.tokens[query];
  const std::int64_t end = token.position + 1 - window;
  const std::int64_t key = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (std::int64_t{blockIdx.x} * kThreads >= end) return;
  const std::int64_t first = std::int64_t{query} * queries.query_heads + kv_head * group;
  for (int i = threadIdx.x; i < group * d; i += kThreads) q[i] = queries.q[first * d + i] * queries.scale;
  __syncthreads();
  if (key >= end) return;
  const T* const k = reinterpret_cast<const T*>(queries.bases[token.sequence] + queries.layer_offset +
                                                queries.layout.key_offset(kv_head, key));
  float sum[kMostGroup] = {};
  constexpr int kEach = kPack<T>;
  if (d % kEach == 0) {
    for (int c = 0; c < d; c += kEach) {
      float x[kEach];
      widen_pack<T>(*reinterpret_cast<const uint4*>(k + c), x);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum[g] += x[i] * q[g * d + c + i];
      }
    }
  } else {
    for (int c = 0; c < d; ++c) {
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g < group) sum[g] += widen(k[c]) * q[g * d + c];
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) {
    if (g < group) scores[(first + g) * max_tokens + key] = key < sink ? -INFINITY : sum[g];
  }
}

/// Peak and sum of exponentials of a row, over the block; NaN and -inf count nothing.
__device__ float log_sum(const float* row, std::int64_t begin, std::int64_t end, float* shared) {
  float peak = -INFINITY, sum = 0.0f;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kShareThreads) peak = fmaxf(peak, row[i]);
  for (int offset = 16; offset > 0; offset /= 2)
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = peak;
  __syncthreads();
  for (int w = 0; w < kShareThreads / 32; ++w) peak = fmaxf(peak, shared[w]);
  __syncthreads();
  if (!(peak > -INFINITY)) return 0.0f;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kShareThreads) {
    if (row[i] > -INFINITY) sum += __expf(row[i] - peak);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < kShareThreads / 32; ++w) sum += shared[w];
  __syncthreads();
  return peak + logf(sum);
}

__global__ void __launch_bounds__(kShareThreads)
    share_kernel(const float* scores, const QueryToken* tokens, int query_heads, int kv_heads,
                 std::int64_t window, std::int64_t max_tokens, float* shared_scores) {
  __shared__ float shared[kShareThreads / 32];
  const int group = query_heads / kv_heads, query = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const std::int64_t end = max(std::int64_t{0}, tokens[query].position + 1 - window);
  const float* const first = scores + (std::int64_t{query} * query_heads + kv_head * group) * max_tokens;
  float lse[kMostGroup];
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g)
    lse[g] = g < group ? log_sum(first + g * max_tokens, 0, end, shared) : 0.0f;
  float* const out = shared_scores + std::int64_t{blockIdx.x} * max_tokens;
  for (std::int64_t i = threadIdx.x; i < end; i += kShareThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      if (g < group && first[g * max_tokens + i] > -INFINITY)
        sum += __expf(first[g * max_tokens + i] - lse[g]);
    }
    out[i] = logf(sum);
  }
}

}  // namespace

void score_keys(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                float* scores, StreamHandle stream) {
  const int group = queries.query_heads / queries.layout.kv_heads;
  if (queries.count == 0 || max_tokens <= window) return;
  if (group > kMostGroup)
    throw RunError("expected at most 16 query heads a KV head, found " + std::to_string(group));
  const dim3 grid(static_cast<unsigned>((max_tokens - window + kThreads - 1) / kThreads),
                  static_cast<unsigned>(queries.layout.kv_heads), static_cast<unsigned>(queries.count));
  const std::size_t shared = static_cast<std::size_t>(group * queries.layout.head_dim) * sizeof(float);
  if (queries.layout.type == DType::f32)
    score_kernel<float><<<grid, kThreads, shared, stream>>>(queries, sink, window, max_tokens, scores);
  else if (queries.layout.type == DType::f16)
    score_kernel<__half><<<grid, kThreads, shared, stream>>>(queries, sink, window, max_tokens, scores);
  else
    score_kernel<__nv_bfloat16>
        <<<grid, kThreads, shared, stream>>>(queries, sink, window, max_tokens, scores);
  LODE_LAUNCHED();
}

void share_scores(const float* scores, const Queries& queries, std::int64_t window, std::int64_t max_tokens,
                  float* shared, StreamHandle stream) {
  if (queries.count == 0) return;
  share_kernel<<<queries.count * queries.layout.kv_heads, kShareThreads, 0, stream>>>(
      scores, queries.tokens, queries.query_heads, queries.layout.kv_heads, window, max_tokens, shared);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
