// SPDX-License-Identifier: Apache-2.0
// Work map of code_kernel: grid (blocks of keys, KV heads, layers); a thread has a key, its channels and
// sixteen centroids at a time lie in shared memory.
// Of table_kernel: grid (parts, KV heads x chunks of their heads, query tokens); threads share the channels
// of each centroid.
// Of score_kernel: as that of label_keys.cu; what limits it is how often threads of a warp look into the same
// banks of the tables.
#include <algorithm>

#include "kernels/cuda/baselines/pq_encode.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/select/exponential_sum.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kDepth = 64, kAtOnce = 16;  // channels, centroids
constexpr int kKeys = 4;                  // of a thread
constexpr int kTableThreads = 256;
constexpr int kTableFloats = 8192;  // of a block's tables at once, unless a single one is larger
static_assert(kThreads * kKeys == kKeysOfSum);

/// A block's keys and centroids, channel by channel.
struct Tile {
  float keys[kDepth][kThreads + 1], centroids[kDepth][kAtOnce];
  unsigned finite[kWarps];
};

/// The channels [first, first + kDepth) of keys, zeros where there are none.
template <class T>
__device__ void load_keys(Tile& tile, const char* base, const KvLayout& layout, int head, std::int64_t begin,
                          std::int64_t end, int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int i = warp; i < kThreads; i += kWarps) {
    const bool there = begin + i < end && (tile.finite[i / 32] >> i % 32 & 1) != 0;
    const T* const row = reinterpret_cast<const T*>(base + layout.key_offset(head, there ? begin + i : 0));
    for (int c = lane; c < count; c += 32) tile.keys[c][i] = there ? widen(row[first + c]) : 0.0f;
  }
}
template <class T>
__device__ void find_finite(Tile& tile, const char* base, const KvLayout& layout, int head,
                            std::int64_t begin, std::int64_t end) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) {
    const std::int64_t key = begin + warp * 32 + i;
    if (key >= end) break;
    const T* const row = reinterpret_cast<const T*>(base + layout.key_offset(head, key));
    bool finite = true;
    for (int c = lane; c < layout.head_dim; c += 32) finite = finite && isfinite(widen(row[c]));
    all |= __all_sync(~0u, finite) ? 1u << i : 0u;
  }
  if (lane == 0) tile.finite[warp] = all;
}

/// The nearest centroid of a part, for the thread's key.
template <class T>
__device__ int nearest(Tile& tile, const char* base, const KvLayout& layout, const KeyCodes& codes, int head,
                       std::int64_t begin, std::int64_t end, int part, const float* centroids) {
  const int entries = codes.entries(), width = codes.width, thread = static_cast<int>(threadIdx.x);
  float high = -INFINITY;
  int at = 0;
  for (int first = 0; first < entries; first += kAtOnce) {
    float sums[kAtOnce] = {};
    for (int from = 0; from < width; from += kDepth) {
      const int count = min(kDepth, width - from);
      __syncthreads();
      if (first == 0 || width > kDepth)
        load_keys<T>(tile, base, layout, head, begin, end, part * width + from, count);
      for (int i = thread; i < count * kAtOnce; i += kThreads)
        tile.centroids[i / kAtOnce][i % kAtOnce] =
            centroids[(from + i / kAtOnce) * entries + first + i % kAtOnce];
      __syncthreads();
      for (int c = 0; c < count; ++c) {
        const float x = tile.keys[c][thread];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) sums[j] = fmaf(tile.centroids[c][j], x, sums[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float near = sums[j] + centroids[width * entries + first + j];
      if (near > high) high = near, at = first + j;
    }
  }
  return at;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    code_kernel(const char* base, const __grid_constant__ KvLayout layout, std::int64_t begin,
                std::int64_t end, const __grid_constant__ KeyCodes to) {
  __shared__ Tile tile;
  const int head = static_cast<int>(blockIdx.y), layer = static_cast<int>(blockIdx.z);
  const std::int64_t first = begin + std::int64_t{blockIdx.x} * kThreads, key = first + threadIdx.x;
  base += layer * layout.layer_stride;
  const float* const centroids =
      to.centroids + (std::int64_t{layer} * layout.kv_heads + head) * to.centroids_of_head();
  std::uint8_t* const codes =
      to.codes + layer * to.layer_bytes(layout.kv_heads) + std::int64_t{head} * to.planes() * to.capacity;
  find_finite<T>(tile, base, layout, head, first, end);
  const std::int64_t of_part = std::int64_t{to.width + 1} * to.entries();
  const auto code = [&](int part) {
    return nearest<T>(tile, base, layout, to, head, first, end, part, centroids + part * of_part);
  };
  const int step = to.nibbles() ? 2 : 1;
  for (int part = 0; part < to.parts; part += step) {
    int byte = code(part);
    if (step == 2 && part + 1 < to.parts) byte |= code(part + 1) << 4;
    if (key < end) codes[part / step * to.capacity + key] = static_cast<std::uint8_t>(byte);
  }
}

struct Params {
  Queries queries;
  KeyCodes codes;
  int chunks = 1;  ///< of the heads of a KV head
  std::int64_t sink = 0, window = 0, max_tokens = 0;
  float* tables = nullptr;  // [N, Hkv, chunks, parts, entries, kHeads]
  float* scores = nullptr;
  ExponentialSum* sums = nullptr;
};
/// Heads that share a table's entry.
int heads_together(int group) {
  return group == 1 ? 1 : group <= 4 ? 4 : 8;
}

template <int kHeads>
__global__ void __launch_bounds__(kTableThreads) table_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float shared[];  // [kHeads, width], [kHeads, kTableThreads]
  const Queries& in = p.queries;
  const KeyCodes& codes = p.codes;
  const int part = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y) / p.chunks,
            first_head = static_cast<int>(blockIdx.y) % p.chunks * kHeads,
            thread = static_cast<int>(threadIdx.x);
  const int group = in.query_heads / in.layout.kv_heads, d = in.layout.head_dim, width = codes.width;
  float *const q = shared, *const sums = shared + kHeads * width;
  wait_for_predecessor();
  release_successor();
  const std::int64_t row = std::int64_t{blockIdx.z} * in.query_heads + kv_head * group + first_head;
  for (int i = thread; i < kHeads * width; i += kTableThreads)
    q[i] = first_head + i / width < group ? in.q[(row + i / width) * d + part * width + i % width] * in.scale
                                          : 0.0f;
  __syncthreads();
  const int entries = codes.entries(), shares = kTableThreads / entries, each = (width + shares - 1) / shares,
            entry = thread % entries;
  const float* const centroids = p.codes.centroids + kv_head * codes.centroids_of_head() +
                                 part * (std::int64_t{width} + 1) * entries + entry;
  float sum[kHeads] = {};
#pragma unroll 8
  for (int c = thread / entries * each; c < min(width, (thread / entries + 1) * each); ++c) {
    const float x = centroids[c * entries];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] = fmaf(q[h * width + c], x, sum[h]);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) sums[h * kTableThreads + thread] = sum[h];
  __syncthreads();
  float* const table =
      p.tables + ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * entries * kHeads;
  for (int i = thread; i < entries * kHeads; i += kTableThreads) {
    float all = 0.0f;
    for (int s = 0; s < shares; ++s) all += sums[i % kHeads * kTableThreads + s * entries + i / kHeads];
    table[i] = all;
  }
}

/// Tables of planes [first, first + count), as their bytes name the entries.
template <int kHeads>
__device__ void load_tables(const KeyCodes& codes, const float* parts, int first, int count, float* to) {
  const int entries = codes.entries(), thread = static_cast<int>(threadIdx.x);
  if (!codes.nibbles()) {
    for (int i = thread; i < count * entries * kHeads; i += kThreads)
      to[i] = parts[first * entries * kHeads + i];
    return;
  }
  constexpr int kOfPlane = 256 * kHeads, kOfPart = 16 * kHeads;
  for (int i = thread; i < count * kOfPlane; i += kThreads) {
    const int part = 2 * (first + i / kOfPlane), byte = i % kOfPlane / kHeads, head = i % kHeads;
    const float* const table = parts + part * kOfPart;
    float sum = table[byte % 16 * kHeads + head];
    if (part + 1 < codes.parts) sum += table[kOfPart + byte / 16 * kHeads + head];
    to[i] = sum;
  }
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads)
    score_kernel(const __grid_constant__ Params p, int planes_at_once) {
  extern __shared__ __align__(16) float tables[];  // [planes_at_once, bytes, kHeads]
  const Queries& in = p.queries;
  const KeyCodes& codes = p.codes;
  const int query = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y) / p.chunks,
            first_head = static_cast<int>(blockIdx.y) % p.chunks * kHeads;
  const int group = in.query_heads / in.layout.kv_heads, planes = codes.planes(),
            of_plane = (codes.nibbles() ? 256 : codes.entries()) * kHeads;
  const QueryToken token = in.tokens[query];
  const std::int64_t end = token.position + 1 - p.window, first = blockIdx.x * kKeysOfSum;
  wait_for_predecessor();
  release_successor();
  if (first >= end) return;
  const std::int64_t key = first + threadIdx.x;
  const std::uint8_t* const bytes = codes.codes + token.sequence * codes.sequence_stride +
                                    std::int64_t{kv_head} * planes * codes.capacity + key;
  const float* const of_parts =
      p.tables + (std::int64_t{query} * gridDim.y + blockIdx.y) * codes.parts * codes.entries() * kHeads;
  float sums[kKeys][kHeads] = {};
  for (int plane = 0; plane < planes; plane += planes_at_once) {
    const int count = min(planes_at_once, planes - plane);
    if (plane > 0) __syncthreads();
    load_tables<kHeads>(codes, of_parts, plane, count, tables);
    __syncthreads();
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      const float* const table = tables + i * of_plane;
      int byte[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const std::int64_t at = key + k * kThreads;
        byte[k] = at >= p.sink && at < end ? bytes[(plane + i) * codes.capacity + k * kThreads] : 0;
      }
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        if constexpr (kHeads == 1) {
          sums[k][0] += table[byte[k]];
        } else {
#pragma unroll
          for (int h = 0; h < kHeads; h += 4) {
            const float4 some = *reinterpret_cast<const float4*>(table + byte[k] * kHeads + h);
            sums[k][h] += some.x, sums[k][h + 1] += some.y;
            sums[k][h + 2] += some.z, sums[k][h + 3] += some.w;
          }
        }
      }
    }
  }
  const std::int64_t row = std::int64_t{query} * in.query_heads + kv_head * group + first_head;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h >= group) break;
    float* const scores = p.scores + (row + h) * p.max_tokens;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const std::int64_t at = key + k * kThreads;
      if (at < end) scores[at] = at < p.sink ? -INFINITY : sums[k][h];
    }
  }
  if (p.sums == nullptr) return;
  const std::int64_t stride = sums_of_keys(p.max_tokens);
  post_block_sums<kThreads>(sums, key, p.sink, end, group - first_head, p.sums + row * stride + blockIdx.x,
                            stride);
}

template <int kHeads>
void launch(Params p, StreamHandle stream) {
  const KeyCodes& codes = p.codes;
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  p.chunks = (group + kHeads - 1) / kHeads;
  const dim3 grid = scorer_grid(p.queries, p.max_tokens - p.window, p.chunks);
  EarlyLaunch({static_cast<unsigned>(codes.parts), grid.y, grid.z}, kTableThreads,
              kHeads * (codes.width + kTableThreads) * 4, 1, stream)(table_kernel<kHeads>, p);
  const int of_plane = (codes.nibbles() ? 256 : codes.entries()) * kHeads;
  const int planes = std::clamp(kTableFloats / of_plane, 1, codes.planes());
  EarlyLaunch(grid, kThreads, planes * of_plane * 4, 1, stream)(score_kernel<kHeads>, p, planes);
}

}  // namespace

void code_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
               const KeyCodes& codes, StreamHandle stream) {
  if (begin >= end) return;
  const dim3 grid(static_cast<unsigned>((end - begin + kThreads - 1) / kThreads),
                  static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(layers));
  if (layout.type == DType::f32)
    Launch(grid, kThreads, 0, stream)(code_kernel<float>, base, layout, begin, end, codes);
  else if (layout.type == DType::f16)
    Launch(grid, kThreads, 0, stream)(code_kernel<__half>, base, layout, begin, end, codes);
  else
    Launch(grid, kThreads, 0, stream)(code_kernel<__nv_bfloat16>, base, layout, begin, end, codes);
}

std::int64_t code_tables_bytes(int queries, int query_heads, int kv_heads, const KeyCodes& codes) {
  const int group = query_heads / kv_heads, heads = heads_together(group);
  return std::int64_t{queries} * kv_heads * ((group + heads - 1) / heads * heads) * codes.parts *
         codes.entries() * std::int64_t{sizeof(float)};
}

void score_codes(const Queries& queries, const KeyCodes& codes, std::int64_t sink, std::int64_t window,
                 std::int64_t max_tokens, void* tables, float* scores, ExponentialSum* sums,
                 StreamHandle stream) {
  if (queries.count == 0 || max_tokens <= window) return;
  const Params p = {.queries = queries,
                    .codes = codes,
                    .sink = sink,
                    .window = window,
                    .max_tokens = max_tokens,
                    .tables = static_cast<float*>(tables),
                    .scores = scores,
                    .sums = sums};
  switch (heads_together(queries.query_heads / queries.layout.kv_heads)) {
    case 1:
      return launch<1>(p, stream);
    case 4:
      return launch<4>(p, stream);
    default:
      return launch<8>(p, stream);
  }
}

}  // namespace lode::cuda
