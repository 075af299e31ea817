// SPDX-License-Identifier: Apache-2.0
// Lists are made by a stable counting sort: a warp counts the labels of kSegment keys, a thread for each
// bucket sums the segments, then the warps place their keys in order.
#include <cstdint>

#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/saap/buckets.h"

namespace lode::cuda {

namespace {

constexpr int kSegment = 4096, kThreads = 256;

/// A warp per key.
template <class T>
__global__ void gather_kernel(GatherTask task, float* out) {
  constexpr int kMostPairs = 4;  // of a lane: head dimensions up to 256
  const int d = task.layout.head_dim, half = d / 2, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (row >= task.count) return;
  const std::int64_t key = task.positions != nullptr ? task.positions[row] : task.begin + row * task.step;
  const T* const from = reinterpret_cast<const T*>(task.layer + task.layout.key_offset(task.kv_head, key));
  float a[kMostPairs], b[kMostPairs];
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) break;
    a[j] = widen(from[i]), b[j] = widen(from[i + half]);
    if (task.frequencies != nullptr) {
      float sine, cosine;
      sincosf(__fmul_rn(-static_cast<float>(key), task.frequencies[i]), &sine, &cosine);
      sine /= task.rope_scale, cosine /= task.rope_scale;
      const float turned = a[j] * cosine - b[j] * sine;
      b[j] = b[j] * cosine + a[j] * sine;
      a[j] = turned;
    }
    finite = finite && isfinite(a[j]) && isfinite(b[j]);
  }
  finite = __all_sync(~0u, finite);
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) break;
    out[row * d + i] = finite ? a[j] : 0.0f;
    out[row * d + i + half] = finite ? b[j] : 0.0f;
  }
}

__global__ void narrow_kernel(const std::int32_t* from, std::int64_t count, std::uint16_t* to) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = static_cast<std::uint16_t>(from[i]);
}

/// counts [Hkv, segments, C] of one warp's segment.
__global__ void count_kernel(ListTask task, int segments, std::int32_t* counts) {
  extern __shared__ std::int32_t mine[];  // [C]
  const int segment = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  for (int c = static_cast<int>(threadIdx.x); c < task.buckets; c += kThreads) mine[c] = 0;
  __syncthreads();
  const std::int64_t from = task.begin + std::int64_t{segment} * kSegment,
                     to = min(task.end, from + kSegment);
  for (std::int64_t i = from + threadIdx.x; i < to; i += kThreads)
    atomicAdd(&mine[task.labels[head * task.max_tokens + i]], 1);
  __syncthreads();
  std::int32_t* const out = counts + (std::int64_t{head} * segments + segment) * task.buckets;
  for (int c = static_cast<int>(threadIdx.x); c < task.buckets; c += kThreads) out[c] = mine[c];
}

/// Counts to places: of each segment within its bucket's list, and of the lists. A block per head.
__global__ void __launch_bounds__(1024) place_kernel(ListTask task, int segments, std::int32_t* counts) {
  __shared__ std::int32_t sums[1024];
  const int head = static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
  std::int32_t* const offsets = task.offsets + std::int64_t{head} * (task.buckets + 1);
  std::int32_t* const of_head = counts + std::int64_t{head} * segments * task.buckets;
  int carried = 0;
  for (int first = 0; first < task.buckets; first += 1024) {
    const int bucket = first + tid;
    std::int32_t total = 0;
    if (bucket < task.buckets) {
      for (int s = 0; s < segments; ++s) {
        std::int32_t& at = of_head[std::int64_t{s} * task.buckets + bucket];
        const std::int32_t count = at;
        at = total;
        total += count;
      }
    }
    sums[tid] = total;
    __syncthreads();
    for (int o = 1; o < 1024; o *= 2) {
      const std::int32_t other = tid >= o ? sums[tid - o] : 0;
      __syncthreads();
      sums[tid] += other;
      __syncthreads();
    }
    if (bucket < task.buckets) offsets[bucket] = carried + sums[tid] - total;
    carried += sums[1023];
    __syncthreads();
  }
  if (tid == 0) offsets[task.buckets] = carried;
}

/// One warp places the keys of its segment in order.
__global__ void __launch_bounds__(32) sort_kernel(ListTask task, int segments, const std::int32_t* counts) {
  extern __shared__ std::int32_t next[];  // [C]
  const int segment = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            lane = static_cast<int>(threadIdx.x);
  const std::int32_t* const of_segment = counts + (std::int64_t{head} * segments + segment) * task.buckets;
  const std::int32_t* const offsets = task.offsets + std::int64_t{head} * (task.buckets + 1);
  for (int c = lane; c < task.buckets; c += 32) next[c] = offsets[c] + of_segment[c];
  __syncwarp();
  const std::int64_t from = task.begin + std::int64_t{segment} * kSegment,
                     to = min(task.end, from + kSegment);
  for (std::int64_t i = from; i < to; i += 32) {
    const bool in = i + lane < to;
    const unsigned label = in ? task.labels[head * task.max_tokens + i + lane] : 0x10000u + lane;
    const unsigned same = __match_any_sync(~0u, label);
    const int nth = __popc(same & ((1u << lane) - 1));
    if (in) task.rows[head * task.max_tokens + next[label] + nth] = static_cast<std::int32_t>(i + lane);
    __syncwarp();
    if (in && nth == 0) next[label] += __popc(same);
    __syncwarp();
  }
}

/// A block per centroid; thread c sums dimension c over the points in their order.
__global__ void move_kernel(const float* points, std::int64_t n, const std::int32_t* labels, int d,
                            float* centroids) {
  constexpr int kPiece = 256;  // labels looked through at a time
  __shared__ int found[kPiece], many;
  __shared__ float squares[32];
  const int cluster = static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  float sum = 0.0f;
  std::int64_t members = 0;
  for (std::int64_t from = 0; from < n; from += kPiece) {
    if (tid < 32) {
      int count = 0;
      for (int i = 0; i < kPiece; i += 32) {
        const bool mine = from + i + lane < n && labels[from + i + lane] == cluster;
        const unsigned all = __ballot_sync(~0u, mine);
        if (mine) found[count + __popc(all & ((1u << lane) - 1))] = i + lane;
        count += __popc(all);
      }
      if (lane == 0) many = count;
    }
    __syncthreads();
    for (int i = 0; i < many; ++i)
      if (tid < d) sum += points[(from + found[i]) * d + tid];
    members += many;
    __syncthreads();
  }
  if (members == 0 && tid < d)  // a point far from the others' numbers: any will do, but always the same
    sum = points[(std::int64_t{cluster} * 2654435761ll % n) * d + tid];
  float square = tid < d ? sum * sum : 0.0f;
  for (int o = 16; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
  if (lane == 0) squares[tid / 32] = square;
  __syncthreads();
  float norm = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) norm += squares[w];
  if (tid < d) centroids[std::int64_t{cluster} * d + tid] = norm > 0.0f ? sum * rsqrtf(norm) : 0.0f;
}

unsigned blocks_of(std::int64_t n) {
  return static_cast<unsigned>((n + kThreads - 1) / kThreads);
}

}  // namespace

void gather_keys(const GatherTask& task, float* out, StreamHandle stream) {
  if (task.count == 0) return;
  const unsigned blocks = blocks_of(task.count * 32);
  if (task.layout.type == DType::f32)
    Launch(blocks, kThreads, 0, stream)(gather_kernel<float>, task, out);
  else if (task.layout.type == DType::f16)
    Launch(blocks, kThreads, 0, stream)(gather_kernel<__half>, task, out);
  else
    Launch(blocks, kThreads, 0, stream)(gather_kernel<__nv_bfloat16>, task, out);
}

void narrow_labels(const std::int32_t* from, std::int64_t count, std::uint16_t* to, StreamHandle stream) {
  if (count == 0) return;
  Launch(blocks_of(count), kThreads, 0, stream)(narrow_kernel, from, count, to);
}

std::int64_t list_workspace_bytes(int kv_heads, int buckets, std::int64_t max_tokens) {
  return (max_tokens / kSegment + 2) * kv_heads * buckets * 4;
}

void list_buckets(const ListTask& task, StreamHandle stream) {
  const int segments =
      static_cast<int>(std::max<std::int64_t>(1, (task.end - task.begin + kSegment - 1) / kSegment));
  auto* const counts = static_cast<std::int32_t*>(task.workspace);
  const dim3 grid(static_cast<unsigned>(segments), static_cast<unsigned>(task.kv_heads));
  const auto shared = static_cast<unsigned>(task.buckets * 4);
  Launch(grid, kThreads, shared, stream)(count_kernel, task, segments, counts);
  Launch(static_cast<unsigned>(task.kv_heads), 1024, 0, stream)(place_kernel, task, segments, counts);
  Launch(grid, 32, shared, stream)(sort_kernel, task, segments, counts);
}

void move_centroids(const float* points, std::int64_t n, const std::int32_t* labels, int clusters, int d,
                    float* centroids, StreamHandle stream) {
  const auto threads = static_cast<unsigned>((d + 31) / 32 * 32);
  Launch(static_cast<unsigned>(clusters), threads, 0, stream)(move_kernel, points, n, labels, d, centroids);
}

}  // namespace lode::cuda
