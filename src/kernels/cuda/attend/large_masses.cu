// SPDX-License-Identifier: Apache-2.0
// Work map: a block of kBlockTokens threads takes one block of keys, one thread a key, against up to kRows rows of one KV
// head: some query tokens times the heads of the group, in shared memory.
//
//   scores  -> each row's largest score and sum of exponentials in the block     [N, Hq, blocks]
//   lse     -> of each row, over the blocks in rising order                      [N, Hq]
//   emit    -> blocks where a row's largest score reaches lse + log least score again and write what is large
#include "kernels/cuda/attend/large_masses.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"

namespace lode::cuda {

namespace {

constexpr int kRows = 16, kMostDim = 256, kWarps = kBlockTokens / 32;

/// Of one row in one block of keys: the largest score, and the sum of exp(score - largest).
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
__device__ void load_queries(const MassQuery& query, const Tile& tile, float (&q)[kRows][kMostDim]) {
  const int d = query.layout.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * d; i += kBlockTokens) {
    const int r = i / d, c = i % d;
    q[r][c] = r < tile.rows ? query.q[tile.query_of(query, r) * d + c] * query.scale : 0.0f;
  }
  __syncthreads();
}

/// The thread's key against all rows; -inf where a row may not see it.
template <class T>
__device__ void score(const MassQuery& query, const Tile& tile, const float (&q)[kRows][kMostDim],
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

/// The same reduction in every thread's order: lanes by halves, then warps.
template <class Fold>
__device__ float over_block(float x, float (&warps)[kWarps], Fold fold) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x = fold(x, __shfl_xor_sync(~0u, x, half));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = fold(x, warps[w]);
  __syncthreads();
  return x;
}

template <class T>
__global__ void __launch_bounds__(kBlockTokens) score_kernel(MassQuery query, Peak* peaks) {
  __shared__ float q[kRows][kMostDim];
  __shared__ float warps[kWarps];
  const Tile tile(query);
  load_queries(query, tile, q);
  float s[kRows];
  score<T>(query, tile, q, s);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
    const float top = over_block(s[r], warps, [](float a, float b) { return fmaxf(a, b); });
    const float base = top == -INFINITY ? 0.0f : top;
    const float sum = over_block(expf(s[r] - base), warps, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) peaks[tile.query_of(query, r) * gridDim.x + blockIdx.x] = {top, sum};
  }
}

/// One thread a row: blocks merge in rising order.
__global__ void lse_kernel(const Peak* peaks, int rows, int blocks, float* lse) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  Peak all;
  for (int b = 0; b < blocks; ++b) {
    const Peak own = peaks[std::int64_t{row} * blocks + b];
    if (own.top == -INFINITY && own.sum == 0.0f) continue;
    const float top = fmaxf(all.top, own.top);
    all.sum = (all.top == -INFINITY ? 0.0f : all.sum * expf(all.top - top)) + own.sum * expf(own.top - top);
    all.top = top;
  }
  lse[row] = all.top + logf(all.sum);
}

template <class T>
__global__ void __launch_bounds__(kBlockTokens)
    emit_kernel(MassQuery query, const Peak* peaks, const float* lse, LargeMass* found, std::int32_t* counter,
                std::int32_t capacity) {
  __shared__ float q[kRows][kMostDim];
  const Tile tile(query);
  const float least = logf(query.least) - 1e-3f;  // peaks are rounded once more than masses
  bool large = false;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t row = tile.query_of(query, r);
    large |= peaks[row * gridDim.x + blockIdx.x].top - lse[row] >= least;
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

template <class T>
void find(const MassQuery& query, void* workspace, LargeMass* found, std::int32_t* counter,
          StreamHandle handle) {
  const auto stream = static_cast<cudaStream_t>(handle);
  const int rows = query.count * query.query_heads, blocks = blocks_of(query.keys());
  auto* const peaks = static_cast<Peak*>(workspace);
  auto* const lse = reinterpret_cast<float*>(peaks + std::int64_t{rows} * blocks);
  const int group = query.query_heads / query.layout.kv_heads, each = kRows / group;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>((query.count + each - 1) / each * query.layout.kv_heads));
  LODE_CUDA(cudaMemsetAsync(counter, 0, sizeof *counter, stream));
  score_kernel<T><<<grid, kBlockTokens, 0, stream>>>(query, peaks);
  LODE_LAUNCHED();
  lse_kernel<<<(rows + 63) / 64, 64, 0, stream>>>(peaks, rows, blocks, lse);
  LODE_LAUNCHED();
  emit_kernel<T><<<grid, kBlockTokens, 0, stream>>>(query, peaks, lse, found, counter,
                                                    static_cast<std::int32_t>(query.most_found()));
  LODE_LAUNCHED();
}

}  // namespace

std::int64_t large_masses_workspace_bytes(int count, int query_heads, std::int64_t keys) {
  return std::int64_t{count} * query_heads *
         (blocks_of(keys) * std::int64_t{sizeof(Peak)} + std::int64_t{sizeof(float)});
}

void find_large_masses(const MassQuery& query, void* workspace, LargeMass* found, std::int32_t* counter,
                       StreamHandle stream) {
  if (query.layout.head_dim > kMostDim || query.query_heads / query.layout.kv_heads > kRows)
    throw RunError("sources on the GPU: expected heads of at most 256 dimensions in groups of at most 16");
  if (query.layout.type == DType::f32) return find<float>(query, workspace, found, counter, stream);
  if (query.layout.type == DType::f16) return find<__half>(query, workspace, found, counter, stream);
  find<__nv_bfloat16>(query, workspace, found, counter, stream);
}

}  // namespace lode::cuda
