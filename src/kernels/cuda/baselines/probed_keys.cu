// SPDX-License-Identifier: Apache-2.0
// Work map of both kernels: grid (pieces of lists or keys, KV heads x query tokens), a warp a row, kRows of
// them at a time so that several are on their way; lanes have four channels of each, or twice four.
#include "kernels/cuda/baselines/probed_keys.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 4, kLaneChannels = 4;
constexpr int kListsOfBlock = kWarps * kRows;
constexpr std::int64_t kKeysOfBlock = 2048;
constexpr int kMostGroup = 16;
static_assert((kMostGroup * kMostProbedDim + kMostProbedLists) * 4 <= 48 << 10);  // without asking for more

template <class T>
struct alignas(kLaneChannels * sizeof(T)) Four {
  T x[kLaneChannels];
};

/// A row over the lanes of a warp; zeros behind its end.
template <int kChunks>
struct LaneRow {
  float x[kChunks][kLaneChannels];

  template <class T>
  __device__ void load(const T* row, int d, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int c = (chunk * 32 + lane) * kLaneChannels;
      const Four<T> four = c < d ? *reinterpret_cast<const Four<T>*>(row + c) : Four<T>{};
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) x[chunk][i] = widen(four.x[i]);
    }
  }
  /// In every lane.
  __device__ float dot(const float* q /*[32 kChunks kLaneChannels]*/, int lane) const {
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i)
        sum = fmaf(q[(chunk * 32 + lane) * kLaneChannels + i], x[chunk][i], sum);
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
  }
};

/// The queries of a group in shared memory, filled up with zeros: [G, 32 kChunks kLaneChannels].
template <int kChunks>
__device__ void take_queries(const Queries& in, std::int64_t first_row, int group, float* q) {
  constexpr int kWidth = kChunks * 32 * kLaneChannels;
  const int d = in.layout.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < group * kWidth; i += kThreads) {
    const int c = i % kWidth;
    q[i] = c < d ? in.q[(first_row + i / kWidth) * d + c] : 0.0f;
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kThreads)
    lists_kernel(const __grid_constant__ Queries in, const float* centroids, int lists, float* scores) {
  extern __shared__ __align__(16) float q[];
  constexpr int kWidth = kChunks * 32 * kLaneChannels;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = in.query_heads / in.layout.kv_heads, d = in.layout.head_dim;
  const std::int64_t first_row = std::int64_t{blockIdx.y} * group;
  wait_for_predecessor();
  release_successor();
  take_queries<kChunks>(in, first_row, group, q);
  __syncthreads();
  const std::int64_t kv_head = blockIdx.y % in.layout.kv_heads;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kRows;
  LaneRow<kChunks> rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < lists) rows[r].load(centroids + (kv_head * lists + first + r) * d, d, lane);
  for (int g = 0; g < group; ++g) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= lists) break;
      const float score = rows[r].dot(q + g * kWidth, lane);
      if (lane == 0) scores[(first_row + g) * lists + first + r] = score;
    }
  }
}

struct Params {
  Queries queries;
  ProbedKeys keys;
  std::int64_t sink = 0, window = 0, max_tokens = 0;
  float* scores = nullptr;
  std::int32_t* scanned = nullptr;
};

/// heads[list] := a bit for each head of the group that has chosen it.
__device__ void take_lists(const ProbedKeys& keys, std::int64_t first_row, int group, unsigned* heads) {
  for (int list = static_cast<int>(threadIdx.x); list < keys.lists; list += kThreads) heads[list] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < group * keys.most; i += kThreads) {
    const int g = i / keys.most;
    if (i % keys.most < keys.counts[first_row + g])
      atomicOr(heads + keys.probed[first_row * keys.most + i], 1u << g);
  }
}

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads) keys_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kWidth = kChunks * 32 * kLaneChannels;
  const Queries& in = p.queries;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = in.query_heads / in.layout.kv_heads,
            kv_head = static_cast<int>(blockIdx.y) % in.layout.kv_heads;
  const QueryToken token = in.tokens[blockIdx.y / in.layout.kv_heads];
  const std::int64_t end = token.position + 1 - p.window, piece = blockIdx.x * kKeysOfBlock;
  wait_for_predecessor();
  release_successor();
  if (piece >= end) return;
  const std::int64_t first_row = std::int64_t{blockIdx.y} * group;
  float* const q = shared;
  auto* const heads = reinterpret_cast<unsigned*>(shared + group * kWidth);
  take_queries<kChunks>(in, first_row, group, q);
  take_lists(p.keys, first_row, group, heads);
  __syncthreads();
  const char* const layer = in.bases[token.sequence] + in.layer_offset;
  const std::uint16_t* const labels =
      p.keys.labels + token.sequence * p.keys.sequence_stride + kv_head * p.max_tokens;
  int scanned = 0;  // of head `lane`
  for (std::int64_t first = piece + warp * 32; first < piece + kKeysOfBlock && first < end;
       first += kThreads) {
    const std::int64_t key = first + lane;
    const bool far = key >= p.sink && key < end;
    const unsigned mine = far ? heads[labels[key]] : 0;
    for (int g = 0; g < group; ++g) {
      const bool wanted = mine >> g & 1;
      const unsigned all = __ballot_sync(~0u, wanted);
      if (lane == g) scanned += __popc(all);
      if (!wanted && key < end) p.scores[(first_row + g) * p.max_tokens + key] = -INFINITY;
    }
    for (unsigned left = __ballot_sync(~0u, mine != 0); left != 0;) {
      LaneRow<kChunks> rows[kRows];
      int source[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        source[r] = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        if (source[r] >= 0)
          rows[r].load(reinterpret_cast<const T*>(layer + in.layout.key_offset(kv_head, first + source[r])),
                       in.layout.head_dim, lane);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (source[r] < 0) break;
        for (unsigned who = __shfl_sync(~0u, mine, source[r]); who != 0; who &= who - 1) {
          const int g = __ffs(static_cast<int>(who)) - 1;
          const float score = rows[r].dot(q + g * kWidth, lane) * in.scale;
          if (lane == 0) p.scores[(first_row + g) * p.max_tokens + first + source[r]] = score;
        }
      }
    }
  }
  if (lane < group && scanned > 0) atomicAdd(p.scanned + first_row + lane, scanned);
}

template <class T, int kChunks>
void launch_keys(const Params& p, StreamHandle stream) {
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  const int shared = (group * kChunks * 32 * kLaneChannels + p.keys.lists) * 4;
  const dim3 grid(static_cast<unsigned>((p.max_tokens - p.window + kKeysOfBlock - 1) / kKeysOfBlock),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.queries.count));
  EarlyLaunch(grid, kThreads, shared, 1, stream)(keys_kernel<T, kChunks>, p);
}

template <class T>
void launch_keys_of(const Params& p, StreamHandle stream) {
  if (p.queries.layout.head_dim <= 32 * kLaneChannels) return launch_keys<T, 1>(p, stream);
  launch_keys<T, 2>(p, stream);
}

template <int kChunks>
void launch_lists(const Queries& queries, const float* centroids, int lists, float* scores,
                  StreamHandle stream) {
  const int group = queries.query_heads / queries.layout.kv_heads;
  const dim3 grid(static_cast<unsigned>((lists + kListsOfBlock - 1) / kListsOfBlock),
                  static_cast<unsigned>(queries.layout.kv_heads * queries.count));
  EarlyLaunch(grid, kThreads, group * kChunks * 32 * kLaneChannels * 4, 1, stream)(
      lists_kernel<kChunks>, queries, centroids, lists, scores);
}

}  // namespace

void score_lists(const Queries& queries, const float* centroids, int lists, float* scores,
                 StreamHandle stream) {
  if (queries.count == 0) return;
  if (queries.layout.head_dim <= 32 * kLaneChannels)
    return launch_lists<1>(queries, centroids, lists, scores, stream);
  launch_lists<2>(queries, centroids, lists, scores, stream);
}

void score_probed_keys(const Queries& queries, const ProbedKeys& keys, std::int64_t sink, std::int64_t window,
                       std::int64_t max_tokens, float* scores, std::int32_t* scanned, StreamHandle stream) {
  if (queries.count == 0 || max_tokens <= window) return;
  const Params p = {queries, keys, sink, window, max_tokens, scores, scanned};
  switch (queries.layout.type) {
    case DType::f32:
      return launch_keys_of<float>(p, stream);
    case DType::f16:
      return launch_keys_of<__half>(p, stream);
    default:
      return launch_keys_of<__nv_bfloat16>(p, stream);
  }
}

}  // namespace lode::cuda
