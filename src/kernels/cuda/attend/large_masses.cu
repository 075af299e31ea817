// SPDX-License-Identifier: Apache-2.0
// Work map: a block of kBlockTokens threads takes one block of keys, against rows of one KV head: query tokens times the heads
// of the group, kRows at a time.
//
//   scores  -> each row's largest score and sum of exponentials in each stretch of 32 keys   [N, Hq, stretches]
//              (keys of 16 bits: matrix products, a warp a stretch; of float32: a thread a key)
//   lse     -> of each row, over its stretches                                               [N, Hq]
//   emit    -> blocks where a row's largest score comes near lse + log least score again, a thread a key and with queries
//              that are not rounded, and write what is large
#include <type_traits>

#include "kernels/cuda/attend/large_masses.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

namespace {

constexpr int kRows = 16, kUsualDim = 256, kMostDim = 512, kWarps = kBlockTokens / 32;
constexpr float kPeakMargin = 0.1f;  // of a logarithm: peaks may be of rounded queries
constexpr int kStretch = 32;         // keys of one warp
constexpr int kRowShares = 4;        // blocks that share the rows of one KV head

/// Of one row in one stretch of keys: the largest score, and the sum of exp(score - largest).
struct Peak {
  float top = -INFINITY, sum = 0.0f;
};

/// What one block of threads works on.
struct Tile {
  int group, token, tokens, rows, kv_head;
  std::int64_t key;  ///< the thread's

  __device__ explicit Tile(const MassQuery& query) {
    group = query.query_heads / query.layout.kv_heads;
    const int each = kRows / group;
    kv_head = static_cast<int>(blockIdx.y) % query.layout.kv_heads;
    token = static_cast<int>(blockIdx.y) / query.layout.kv_heads * each;
    tokens = min(each, query.count - token);
    rows = tokens * group;
    key = std::int64_t{blockIdx.x} * kBlockTokens + threadIdx.x;
  }
  /// Of row r, in [N, Hq].
  __device__ std::int64_t query_of(const MassQuery& query, int r) const {
    return std::int64_t{token + r / group} * query.query_heads + kv_head * group + r % group;
  }
  __device__ bool sees(const MassQuery& query, int r) const {
    return key <= query.position + token + r / group;
  }
};

/// The rows' queries, scaled; zeros where a tile has fewer rows.
template <int kDim>
__device__ void load_queries(const MassQuery& query, const Tile& tile, float (&q)[kRows][kDim]) {
  const int d = query.layout.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * d; i += kBlockTokens) {
    const int r = i / d, c = i % d;
    q[r][c] = r < tile.rows ? query.q[tile.query_of(query, r) * d + c] * query.scale : 0.0f;
  }
  __syncthreads();
}

/// The thread's key against all rows; -inf where a row may not see it.
template <class T, int kDim>
__device__ void score(const MassQuery& query, const Tile& tile, const float (&q)[kRows][kDim],
                      float (&s)[kRows]) {
  const bool in_document = tile.key < query.seam;
  const std::int64_t row = in_document ? tile.key : tile.key - query.seam;
  const bool there = tile.key < query.position + query.count;
  const char* const k =
      (in_document ? query.document : query.behind) + query.layout.key_offset(tile.kv_head, there ? row : 0);
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[r] = 0.0f;
  if (there)
    for (int c = 0; c < query.layout.head_dim; c += kPack<T>) {
      float x[kPack<T>];
      widen_pack<T>(*reinterpret_cast<const uint4*>(k + c * static_cast<int>(sizeof(T))), x);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) s[r] += x[i] * q[r][c + i];
    }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (!there || !tile.sees(query, r)) s[r] = -INFINITY;
}

template <int kWidth, class Fold>
__device__ float over_lanes(float x, Fold fold) {
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) x = fold(x, __shfl_xor_sync(~0u, x, half));
  return x;
}
template <int kWidth>
__device__ float largest(float x) {
  return over_lanes<kWidth>(x, [](float a, float b) { return fmaxf(a, b); });
}
template <int kWidth>
__device__ float sum(float x) {
  return over_lanes<kWidth>(x, [](float a, float b) { return a + b; });
}

/// Plain products, for keys of float32. kDim: numbers of a head, at most.
template <int kDim>
__global__ void __launch_bounds__(kBlockTokens) score_kernel(MassQuery query, Peak* peaks) {
  __shared__ float q[kRows][kDim];
  const Tile tile(query);
  load_queries(query, tile, q);
  float s[kRows];
  score<float>(query, tile, q, s);
  const std::int64_t stretches = std::int64_t{gridDim.x} * kWarps, stretch = tile.key / kStretch;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
    const float top = largest<32>(s[r]);
    const float all = sum<32>(expf(s[r] - (top == -INFINITY ? 0.0f : top)));
    if (threadIdx.x % 32 == 0) peaks[tile.query_of(query, r) * stretches + stretch] = {top, all};
  }
}

/// Scaled queries in the keys' type, [N, Hq, d].
template <class T>
__global__ void round_kernel(MassQuery query, T* to) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < std::int64_t{query.count} * query.query_heads * query.layout.head_dim)
    narrow(query.q[i] * query.scale, to + i);
}

/// Matrix products: each warp keeps a stretch of keys in registers and goes through the rows of its KV head, kRows at a
/// time. Queries are rounded to the keys' type, as in prefill. Of large heads it has one of the parts of the keys at a time,
/// and reads each again for the next rows.
template <class T, int kSteps, int kParts>  // 16 columns a step; beyond d all are 0
__global__ void __launch_bounds__(kBlockTokens)
    matrix_score_kernel(MassQuery query, const T* q, Peak* peaks) {
  constexpr int kTiles = kStretch / 8;
  const int d = query.layout.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int kv_head = static_cast<int>(blockIdx.y) % query.layout.kv_heads;
  const int group = query.query_heads / query.layout.kv_heads, rows = query.count * group;
  const std::int64_t stretches = std::int64_t{gridDim.x} * kWarps;
  const std::int64_t stretch = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32,
                     first = stretch * kStretch;
  unsigned k[kTiles][kSteps][2];
  const auto load_keys = [&](int column) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const std::int64_t key = min(first + 8 * n + g, query.position + query.count - 1);
      const bool in_document = key < query.seam;
      const auto* const row =
          reinterpret_cast<const T*>((in_document ? query.document : query.behind) +
                                     query.layout.key_offset(kv_head, in_document ? key : key - query.seam));
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = column + 16 * step;
          k[n][step][half] = at < d ? *reinterpret_cast<const unsigned*>(row + at + 8 * half + 2 * t) : 0u;
        }
    }
  };
  if constexpr (kParts == 1) load_keys(0);
  const int share = (rows + kRows - 1) / kRows, each = (share + kRowShares - 1) / kRowShares;
  const int part = static_cast<int>(blockIdx.y) / query.layout.kv_heads;
  for (int tile = part * each; tile < min(share, (part + 1) * each); ++tile) {
    // Rows g and g + 8 of the tile, by their place in [N, Hq]; beyond the last the last.
    std::int64_t at[2], seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = min(tile * kRows + g + 8 * half, rows - 1);
      at[half] = std::int64_t{r / group} * query.query_heads + kv_head * group + r % group;
      seen[half] = query.position + r / group - first;  // of the stretch's keys the last that the row sees
    }
    float s[kTiles][4] = {};
#pragma unroll 1
    for (int column = 0; column < kParts * kSteps * 16; column += kSteps * 16) {
      if constexpr (kParts > 1) load_keys(column);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned a[4];
        const int from = column + 16 * step;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i] = from < d ? *reinterpret_cast<const unsigned*>(q + at[i % 2] * d + from + 8 * (i / 2) + 2 * t)
                          : 0u;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) multiply<T>(s[n], a, k[n][step][0], k[n][step][1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY, all = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[n][2 * half + c];
          if (8 * n + 2 * t + c > seen[half]) x = -INFINITY;
          top = fmaxf(top, x);
        }
      top = largest<4>(top);
      const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) all += __expf(s[n][2 * half + c] - base);
      all = sum<4>(all);
      if (t == 0 && tile * kRows + g + 8 * half < rows) peaks[at[half] * stretches + stretch] = {top, all};
    }
  }
}

/// One warp a row: lanes take every 32nd stretch in rising order, then fold by halves.
__global__ void lse_kernel(const Peak* peaks, int rows, int stretches, float* lse) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows) return;
  const Peak* const own = peaks + std::int64_t{row} * stretches;
  float top = -INFINITY, all = 0.0f;
  for (int i = lane; i < stretches; i += 32) top = fmaxf(top, own[i].top);
  top = largest<32>(top);
  const float base = top == -INFINITY ? 0.0f : top;
  for (int i = lane; i < stretches; i += 32) all += own[i].sum * expf(own[i].top - base);
  all = sum<32>(all);
  if (lane == 0) lse[row] = base + logf(all);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kBlockTokens)
    emit_kernel(MassQuery query, const Peak* peaks, const float* lse, LargeMass* found, std::int32_t* counter,
                std::int32_t capacity) {
  __shared__ float q[kRows][kDim];
  const Tile tile(query);
  const float least = logf(query.least) - kPeakMargin;
  const std::int64_t stretches = std::int64_t{gridDim.x} * kWarps, first = std::int64_t{blockIdx.x} * kWarps;
  bool large = false;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t row = tile.query_of(query, r);
    for (int w = 0; w < kWarps; ++w) large |= peaks[row * stretches + first + w].top - lse[row] >= least;
  }
  if (!large) return;  // all threads alike
  load_queries(query, tile, q);
  float s[kRows];
  score<T>(query, tile, q, s);
  float mass = 0.0f, top = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
    const float own = expf(s[r] - lse[tile.query_of(query, r)]);
    mass += own, top = fmaxf(top, own);
    if (r % tile.group + 1 != tile.group) continue;
    if (top >= query.least && mass >= query.least) {
      const std::int32_t at = atomicAdd(counter, 1);
      if (at < capacity)
        found[at] = {tile.token + r / tile.group, tile.kv_head, static_cast<std::int32_t>(tile.key), mass};
    }
    mass = top = 0.0f;
  }
}

int blocks_of(std::int64_t keys) {
  return static_cast<int>((keys + kBlockTokens - 1) / kBlockTokens);
}

std::int64_t queries_of(int count, int query_heads, int d) {
  return std::int64_t{count} * query_heads * d;
}

template <class T, int kSteps = 4>
void score_by_matrix(const MassQuery& query, T* q, Peak* peaks, unsigned blocks, cudaStream_t stream) {
  if constexpr (kSteps <= kUsualDim / 16) {
    const bool large = query.layout.head_dim > kUsualDim;
    if (query.layout.head_dim > 16 * kSteps && (!large || kSteps < kUsualDim / 16))
      return score_by_matrix<T, kSteps + 4>(query, q, peaks, blocks, stream);
    const std::int64_t n = queries_of(query.count, query.query_heads, query.layout.head_dim);
    Launch(static_cast<unsigned>((n + 255) / 256), 256, 0, stream)(round_kernel<T>, query, q);
    const dim3 grid(blocks, static_cast<unsigned>(query.layout.kv_heads * kRowShares));
    constexpr int kParts = kSteps * 16 == kUsualDim ? kMostDim / kUsualDim : 1;
    const auto kernel = large ? matrix_score_kernel<T, kSteps, kParts> : matrix_score_kernel<T, kSteps, 1>;
    Launch(grid, kBlockTokens, 0, stream)(kernel, query, q, peaks);
  }
}

/// kDim: numbers of a head, at most.
template <class T, int kDim>
void find(const MassQuery& query, void* workspace, LargeMass* found, std::int32_t* counter,
          cudaStream_t stream) {
  const int rows = query.count * query.query_heads, blocks = blocks_of(query.keys());
  auto* const peaks = static_cast<Peak*>(workspace);
  auto* const lse = reinterpret_cast<float*>(peaks + std::int64_t{rows} * blocks * kWarps);
  const int group = query.query_heads / query.layout.kv_heads, each = kRows / group;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>((query.count + each - 1) / each * query.layout.kv_heads));
  fill(counter, 0, sizeof *counter, stream);
  if constexpr (std::is_same_v<T, float>) {
    Launch(grid, kBlockTokens, 0, stream)(score_kernel<kDim>, query, peaks);
  } else {
    score_by_matrix<T>(query, reinterpret_cast<T*>(lse + rows), peaks, grid.x, stream);
  }
  Launch(static_cast<unsigned>((rows + 3) / 4), 128, 0, stream)(lse_kernel, peaks, rows, blocks * kWarps,
                                                                lse);
  Launch(grid, kBlockTokens, 0, stream)(emit_kernel<T, kDim>, query, peaks, lse, found, counter,
                                        static_cast<std::int32_t>(query.most_found()));
}
template <class T>
void find(const MassQuery& query, void* workspace, LargeMass* found, std::int32_t* counter,
          cudaStream_t stream) {
  query.layout.head_dim <= kUsualDim ? find<T, kUsualDim>(query, workspace, found, counter, stream)
                                     : find<T, kMostDim>(query, workspace, found, counter, stream);
}

}  // namespace

std::int64_t large_masses_workspace_bytes(int count, int query_heads, int head_dim, std::int64_t keys) {
  const std::int64_t rows = std::int64_t{count} * query_heads;
  return rows * blocks_of(keys) * kWarps * std::int64_t{sizeof(Peak)} + rows * std::int64_t{sizeof(float)} +
         queries_of(count, query_heads, head_dim) * 2;
}

void find_large_masses(const MassQuery& query, void* workspace, LargeMass* found, std::int32_t* counter,
                       StreamHandle stream) {
  const int d = query.layout.head_dim;
  if (d % 16 != 0 || d < 64 || d > kMostDim || query.query_heads / query.layout.kv_heads > kRows)
    throw RunError(
        "sources on the GPU: expected heads of 64 to 512 dimensions, a multiple of 16, in groups of at most "
        "16");
  if (query.layout.type == DType::f32) return find<float>(query, workspace, found, counter, stream);
  if (query.layout.type == DType::f16) return find<__half>(query, workspace, found, counter, stream);
  find<__nv_bfloat16>(query, workspace, found, counter, stream);
}

}  // namespace lode::cuda
