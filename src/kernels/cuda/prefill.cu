// SPDX-License-Identifier: Apache-2.0
// Prefill attention in float32, for parity with the CPU: blocks of 16 queries of one head, tiles of 32 keys
// that start at multiples of 32, an online softmax. A query's bits depend on its own keys alone, not on how
// the prompt was cut into chunks.
#include <string>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/prefill.h"

namespace lode::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kPerWarp = 4, kQueries = kWarps * kPerWarp, kKeys = 32;

std::size_t shared_bytes(int d) {
  return sizeof(float) *
         (static_cast<std::size_t>(d) * kQueries + std::size_t{2} * kKeys * static_cast<std::size_t>(d + 1));
}

/// Rows [first, end) of keys or values to shared memory, zeros after `end`.
template <class T>
__device__ void load_tile(const T* rows, int first, int end, int d, float* to /*[kKeys, d + 1]*/) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * d; i += kThreads) {
    const int row = i / d, c = i % d;
    to[row * (d + 1) + c] = first + row < end ? widen(rows[i]) : 0.0f;
  }
}

/// What a warp knows of its queries so far.
template <int PerLane>
struct State {
  float max[kPerWarp], sum[kPerWarp], out[kPerWarp][PerLane];
};

/// Lane j takes key j; `mine` counts the keys of this tile that each query sees.
template <int PerLane>
__device__ __forceinline__ void add_tile(const float* q /*[d, kQueries]*/, const float* k, const float* v,
                                         int d, float scale, const int (&mine)[kPerWarp],
                                         State<PerLane>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float s[kPerWarp] = {};
  for (int c = 0; c < d; ++c) {
    const float key = k[lane * (d + 1) + c];
    const float4 query = *reinterpret_cast<const float4*>(q + c * kQueries);
    s[0] = fmaf(query.x, key, s[0]);
    s[1] = fmaf(query.y, key, s[1]);
    s[2] = fmaf(query.z, key, s[2]);
    s[3] = fmaf(query.w, key, s[3]);
  }
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    s[r] = lane < mine[r] ? s[r] * scale : -INFINITY;
    float high = s[r], total;
    for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
    high = fmaxf(high, state.max[r]);
    const float base = high == -INFINITY ? 0.0f : high;
    const float keep = expf(state.max[r] - base);
    s[r] = lane < mine[r] ? expf(s[r] - base) : 0.0f;
    total = s[r];
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    state.sum[r] = fmaf(state.sum[r], keep, total);
    state.max[r] = high;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) state.out[r][i] *= keep;
  }
  for (int j = 0; j < kKeys; ++j) {
    float value[PerLane], p[kPerWarp];
#pragma unroll
    for (int i = 0; i < PerLane; ++i) value[i] = lane + 32 * i < d ? v[j * (d + 1) + lane + 32 * i] : 0.0f;
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) p[r] = __shfl_sync(~0u, s[r], j);
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) {
      if (j >= mine[r]) continue;  // a NaN among the values of later keys is none of this query's
#pragma unroll
      for (int i = 0; i < PerLane; ++i) state.out[r][i] = fmaf(p[r], value[i], state.out[r][i]);
    }
  }
}

template <class T, int PerLane>
__global__ __launch_bounds__(kThreads) void prefill_kernel(const Queries in, int position) {
  extern __shared__ __align__(16) float shared[];
  const int d = in.layout.head_dim, head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (in.query_heads / in.layout.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // The last queries have the most keys: they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  float *q = shared, *k = q + d * kQueries, *v = k + kKeys * (d + 1);
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * d; i += kThreads) {
    const int row = first + i / d, c = i % d;
    q[c * kQueries + i / d] =
        row < in.count ? in.q[(std::int64_t{row} * in.query_heads + head) * d + c] : 0.0f;
  }
  const char* layer = in.bases[in.tokens[0].sequence] + in.layer_offset;
  State<PerLane> state;
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    state.max[r] = -INFINITY;
    state.sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) state.out[r][i] = 0.0f;
  }
  const int end = position + min(first + kQueries, in.count);
  for (int tile = 0; tile < end; tile += kKeys) {
    __syncthreads();
    const char* keys = layer + in.layout.key_offset(kv_head, tile);
    load_tile(reinterpret_cast<const T*>(keys), tile, end, d, k);
    load_tile(reinterpret_cast<const T*>(keys + in.layout.value_offset()), tile, end, d, v);
    __syncthreads();
    int mine[kPerWarp];
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) mine[r] = min(position + first + warp * kPerWarp + r + 1, end) - tile;
    add_tile<PerLane>(q + warp * kPerWarp, k, v, d, in.scale, mine, state);
  }
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    const int row = first + warp * kPerWarp + r;
    if (row >= in.count) break;
    const std::int64_t at = std::int64_t{row} * in.query_heads + head;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
      if (lane + 32 * i < d) in.o[at * d + lane + 32 * i] = state.out[r][i] / state.sum[r];
    }
    if (in.lse != nullptr && lane == 0) in.lse[at] = state.max[r] + logf(state.sum[r]);
  }
}

template <class T, int PerLane>
void launch(const Queries& queries, int position, StreamHandle stream) {
  const int d = queries.layout.head_dim;
  const dim3 grid(static_cast<unsigned>((queries.count + kQueries - 1) / kQueries),
                  static_cast<unsigned>(queries.query_heads));
  LODE_CUDA(cudaFuncSetAttribute(prefill_kernel<T, PerLane>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes(d))));
  prefill_kernel<T, PerLane><<<grid, kThreads, shared_bytes(d), stream>>>(queries, position);
  LODE_LAUNCHED();
}

template <class T>
void launch_for(const Queries& queries, int position, StreamHandle stream) {
  const int d = queries.layout.head_dim;
  if (d <= 64)
    launch<T, 2>(queries, position, stream);
  else if (d <= 128)
    launch<T, 4>(queries, position, stream);
  else
    launch<T, 8>(queries, position, stream);
}

}  // namespace

void attend_prefill_f32(const Queries& queries, std::int32_t position, StreamHandle stream) {
  switch (queries.layout.type) {
    case DType::f32:
      return launch_for<float>(queries, position, stream);
    case DType::f16:
      return launch_for<__half>(queries, position, stream);
    case DType::bf16:
      return launch_for<__nv_bfloat16>(queries, position, stream);
    case DType::q8:
      break;
  }
  throw RunError("expected keys of type f32, f16 or bf16, found " +
                 std::string(name_of(queries.layout.type)));
}

void attend_prefill(const Queries& queries, std::int32_t position, StreamHandle stream, Precision precision) {
  const int d = queries.layout.head_dim;
  if (d < 2 || d > 256 || queries.query_heads % queries.layout.kv_heads != 0) {
    throw RunError("expected heads of 2 to 256 numbers and whole groups, found " + std::to_string(d) +
                   " numbers and " + std::to_string(queries.query_heads) + " heads on " +
                   std::to_string(queries.layout.kv_heads));
  }
  if (queries.count == 0) return;
  if (precision == Precision::fast &&
      (attend_prefill_hopper(queries, position, stream) || attend_prefill_mma(queries, position, stream)))
    return;
  attend_prefill_f32(queries, position, stream);
}

}  // namespace lode::cuda
