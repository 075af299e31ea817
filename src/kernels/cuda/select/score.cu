// SPDX-License-Identifier: Apache-2.0
// Scores of every far key in float32, for stores that the matrix unit cannot read (score_products.cu).
//
// Work map of score_kernel: grid (pieces of kKeysOfSum keys, KV heads, query tokens); a thread owns one key
// at a time and reads its row once for all heads of the group, whose queries lie in shared memory.
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/select/exponential_sum.cuh"
#include "kernels/cuda/select/score_products.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kMostGroup = 16;

/// sum[g] = the g-th query . k.
template <class T>
__device__ __forceinline__ void products(const T* k, const float* q /*[group, d]*/, int group, int d,
                                         float (&sum)[kMostGroup]) {
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
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    score_kernel(const __grid_constant__ Queries queries, std::int64_t sink, std::int64_t window,
                 std::int64_t max_tokens, float* scores, ExponentialSum* sums) {
  extern __shared__ float q[];  // [group, d] scaled
  const int group = queries.query_heads / queries.layout.kv_heads, d = queries.layout.head_dim;
  const int query = blockIdx.z, kv_head = blockIdx.y;
  const QueryToken token = queries.tokens[query];
  const std::int64_t end = token.position + 1 - window, begin = std::int64_t{blockIdx.x} * kKeysOfSum;
  if (begin >= end) return;
  const std::int64_t first = std::int64_t{query} * queries.query_heads + kv_head * group;
  for (int i = threadIdx.x; i < group * d; i += kThreads) q[i] = queries.q[first * d + i] * queries.scale;
  __syncthreads();
  ExponentialSum of[kMostGroup];
  for (std::int64_t key = begin + threadIdx.x; key < min(end, begin + kKeysOfSum); key += kThreads) {
    const T* const k = reinterpret_cast<const T*>(queries.bases[token.sequence] + queries.layer_offset +
                                                  queries.layout.key_offset(kv_head, key));
    float sum[kMostGroup] = {};
    products(k, q, group, d, sum);
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      if (g >= group) break;
      scores[(first + g) * max_tokens + key] = key < sink ? -INFINITY : sum[g];
      if (sums != nullptr && key >= sink) add_to(of[g], sum[g]);
    }
  }
  if (sums == nullptr) return;
  const std::int64_t stride = sums_of_keys(max_tokens);
  post_sums<kThreads, 1, kMostGroup>(of, group, sums + first * stride + blockIdx.x, stride);
}

}  // namespace

void score_keys(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                float* scores, ExponentialSum* sums, StreamHandle stream) {
  const int group = queries.query_heads / queries.layout.kv_heads;
  if (queries.count == 0 || max_tokens <= window) return;
  if (score_products(queries, sink, window, max_tokens, scores, sums, stream)) return;
  if (group > kMostGroup)
    throw RunError("expected at most 16 query heads a KV head, found " + std::to_string(group));
  const dim3 grid = scorer_grid(queries, max_tokens - window, 1);
  const std::size_t shared = static_cast<std::size_t>(group * queries.layout.head_dim) * sizeof(float);
  const auto launch = [&](auto* kernel) {
    Launch(grid, kThreads, shared, stream)(kernel, queries, sink, window, max_tokens, scores, sums);
  };
  if (queries.layout.type == DType::f32)
    launch(score_kernel<float>);
  else if (queries.layout.type == DType::f16)
    launch(score_kernel<__half>);
  else
    launch(score_kernel<__nv_bfloat16>);
}

}  // namespace lode::cuda
