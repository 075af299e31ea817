// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/experts/grouped_product.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// Some rows of one expert that a block multiplies.
struct Tile {
  int expert = -1;
  const int* slots = nullptr;
  int count = 0;
};

/// The tile of this number among those of the product's experts, `kRows` slots each; by a whole warp.
template <int kRows>
__device__ Tile find_tile(const GroupedProduct& p, int number) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < p.experts; first += 32) {
    const int e = p.first_expert + first + lane;
    const bool inside = first + lane < p.experts;
    const int begin = inside ? p.routing.begin[e] : 0, count = inside ? p.routing.begin[e + 1] - begin : 0,
              tiles = (count + kRows - 1) / kRows;
    int before = tiles;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += other;
    }
    const int all = __shfl_sync(~0u, before, 31);
    const unsigned found = __ballot_sync(~0u, number < before);
    if (found == 0) {
      number -= all;
      continue;
    }
    const int source = __ffs(static_cast<int>(found)) - 1;
    const int at = (number - __shfl_sync(~0u, before - tiles, source)) * kRows;
    const int start = __shfl_sync(~0u, begin, source), rows = __shfl_sync(~0u, count, source);
    return {p.first_expert + first + source, p.routing.order + start + at, min(kRows, rows - at)};
  }
  return {};
}
__device__ std::int64_t input_row(const GroupedProduct& p, int slot) {
  return p.by_slot ? slot : slot / p.routing.used;
}
template <class T>
__device__ const T* matrix_of(const GroupedProduct& p, int expert) {
  return static_cast<const T*>(p.w) + std::int64_t{expert - p.first_expert} * p.rows * p.cols;
}

// ---- Float32.

constexpr int kPlainTile = 64, kPlainDepth = 16;

template <class X, class W>
__global__ __launch_bounds__(kThreads) void plain_kernel(const GroupedProduct p) {
  __shared__ __align__(16) float xs[kPlainDepth][kPlainTile + 4], ws[kPlainDepth][kPlainTile + 4];
  const Tile tile = find_tile<kPlainTile>(p, static_cast<int>(blockIdx.y));
  if (tile.count <= 0) return;
  const int tid = static_cast<int>(threadIdx.x), load_row = tid / 4, load_k = tid % 4 * 4, tx = tid % 16,
            ty = tid / 16;
  const std::int64_t w0 = std::int64_t{blockIdx.x} * kPlainTile;
  const bool has_x = load_row < tile.count, has_w = w0 + load_row < p.rows;
  const X* const x = static_cast<const X*>(p.x) + (has_x ? input_row(p, tile.slots[load_row]) * p.cols : 0);
  const W* const w = matrix_of<W>(p, tile.expert) + (has_w ? (w0 + load_row) * p.cols : 0);
  float sums[4][4] = {};
  for (std::int64_t k = 0; k < p.cols; k += kPlainDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = k + load_k + i;
      xs[load_k + i][load_row] = has_x && at < p.cols ? widen(x[at]) : 0.0f;
      ws[load_k + i][load_row] = has_w && at < p.cols ? widen(w[at]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPlainDepth; ++j) {
      const float4 a = *reinterpret_cast<const float4*>(&xs[j][ty * 4]),
                   b = *reinterpret_cast<const float4*>(&ws[j][tx * 4]);
      const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r][c] = fmaf(left[r], right[c], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (ty * 4 + r >= tile.count) break;
    float* const to = p.y + tile.slots[ty * 4 + r] * p.rows + w0 + tx * 4;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (w0 + tx * 4 + c < p.rows) to[c] = sums[r][c];
  }
}

// ---- The matrix unit: tiles of 128 slots x 128 rows by 32 columns, eight warps of 64 x 32 each.

constexpr int kTile = 128, kDepth = 32, kStages = 4;
constexpr int kStageBytes = 2 * kTile * kDepth * 2;  // x, then w

/// Sixteen bytes to shared memory, zeros where there are none.
__device__ __forceinline__ void copy_or_zero(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
/// Where piece `piece` of 8 columns of a row lies in a stage's matrix: rows of 64 bytes, their pieces exchanged so that
/// eight rows' pieces of one number lie in all banks.
__device__ __forceinline__ unsigned place(int row, int piece) {
  return static_cast<unsigned>(row * 64 + (piece ^ row / 2 % 4) * 16);
}
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The pieces of a tile that a thread brings: two of x and two of w, each the same piece of its row in every stage.
template <class T>
struct Loader {
  const T* from[4];
  bool there[4];
  unsigned to[4];
  int first;  // column of its piece

  __device__ Loader(const GroupedProduct& p, const Tile& tile, std::int64_t w0) {
    const int tid = static_cast<int>(threadIdx.x), piece = tid % 4;
    first = piece * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tid / 4 + i * (kTile / 2);
      there[i] = row < tile.count;
      from[i] = static_cast<const T*>(p.x) + (there[i] ? input_row(p, tile.slots[row]) * p.cols : 0);
      there[2 + i] = w0 + row < p.rows;
      from[2 + i] = matrix_of<T>(p, tile.expert) + (there[2 + i] ? (w0 + row) * p.cols : 0);
      to[i] = place(row, piece);
      to[2 + i] = kTile * kDepth * 2 + place(row, piece);
    }
  }
  __device__ __forceinline__ void bring(std::int64_t k, std::int64_t cols, unsigned stage) const {
    const std::int64_t at = k + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = there[i] && at < cols;
      copy_or_zero(stage + to[i], from[i] + (inside ? at : 0), inside);
    }
  }
};

template <class T>
__device__ __forceinline__ void multiply_stage(unsigned stage, int warp, int lane, float (&sums)[4][4][4]) {
  const int row0 = warp / 4 * 64, col0 = warp % 4 * 32;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    unsigned a[4][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_matrices(a[i], stage + place(row0 + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; ++j)
      load_matrices(b[j], stage + kTile * kDepth * 2 +
                              place(col0 + j * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void matrix_kernel(const GroupedProduct p) {
  extern __shared__ __align__(128) char memory[];
  const Tile tile = find_tile<kTile>(p, static_cast<int>(blockIdx.y));
  if (tile.count <= 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t w0 = std::int64_t{blockIdx.x} * kTile;
  const Loader<T> loader(p, tile, w0);
  const unsigned base = shared_address(memory);
  const auto steps = static_cast<int>((p.cols + kDepth - 1) / kDepth);
  const auto bring = [&](int step) {
    if (step < steps)
      loader.bring(std::int64_t{step} * kDepth, p.cols,
                   base + static_cast<unsigned>(step % kStages * kStageBytes));
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int step = 0; step < kStages - 1; ++step) bring(step);
  float sums[4][4][4] = {};
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    bring(step + kStages - 1);
    multiply_stage<T>(base + static_cast<unsigned>(step % kStages * kStageBytes), warp, lane, sums);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp / 4 * 64 + i * 16 + half * 8 + lane / 4;
      if (row >= tile.count) continue;
      float* const to = p.y + tile.slots[row] * p.rows;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t column = w0 + warp % 4 * 32 + j * 8 + lane % 4 * 2;
        if (column < p.rows) to[column] = sums[i][j][2 * half];
        if (column + 1 < p.rows) to[column + 1] = sums[i][j][2 * half + 1];
      }
    }
  }
}

dim3 grid_of(const GroupedProduct& p, int tile) {
  return {static_cast<unsigned>((p.rows + tile - 1) / tile),
          static_cast<unsigned>(p.slots / tile + p.experts)};
}

template <class T>
void launch_matrix(const GroupedProduct& p, StreamHandle stream) {
  static PerDevice<bool> prepared;
  prepared.get([] {
    LODE_CUDA(cudaFuncSetAttribute(matrix_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kStages * kStageBytes));
    return true;
  });
  Launch(grid_of(p, kTile), kThreads, kStages * kStageBytes, stream)(matrix_kernel<T>, p);
}

// ---- Few rows: a warp has a row of the matrices at a time.

template <class W>
__global__ __launch_bounds__(kThreads) void few_kernel(const GroupedProduct p, bool packed) {
  const int group = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  if (group >= *p.routing.groups) return;
  const int expert = p.routing.expert[group], begin = p.routing.begin[group],
            rows = p.routing.begin[group + 1] - begin, *const slots = p.routing.order + begin;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; at < p.rows;
       at += std::int64_t{gridDim.x} * kWarps) {
    const W* const w = matrix_of<W>(p, expert) + at * p.cols;
    float sums[kFewRows] = {};
    const auto add = [&](std::int64_t k, const float* values, int count) {
#pragma unroll
      for (int r = 0; r < kFewRows; ++r) {
        if (r >= rows) break;
        const float* const x = static_cast<const float*>(p.x) + input_row(p, slots[r]) * p.cols + k;
        for (int i = 0; i < count; ++i) sums[r] = fmaf(x[i], values[i], sums[r]);
      }
    };
    if (packed) {
      for (std::int64_t k = lane * kPack<W>; k < p.cols; k += 32 * kPack<W>) {
        float values[kPack<W>];
        widen_pack<W>(__ldcs(reinterpret_cast<const uint4*>(w + k)), values);
        add(k, values, kPack<W>);
      }
    } else {
      for (std::int64_t k = lane; k < p.cols; k += 32) {
        const float value = widen(w[k]);
        add(k, &value, 1);
      }
    }
#pragma unroll
    for (int r = 0; r < kFewRows; ++r) {
      if (r >= rows) break;
      const float sum = sum_of_warp(sums[r]);
      if (lane == 0) p.y[slots[r] * p.rows + at] = sum;
    }
  }
}

template <class W>
void launch_few(const GroupedProduct& p, int most_groups, StreamHandle stream) {
  const bool packed = p.cols % kPack<W> == 0 && reinterpret_cast<std::uintptr_t>(p.w) % 16 == 0;
  const std::int64_t wanted = (p.rows + kWarps - 1) / kWarps,
                     most = std::max(8 * device_shape().multiprocessors / most_groups, 1);
  const dim3 grid(static_cast<unsigned>(std::min(wanted, most)), static_cast<unsigned>(most_groups));
  Launch(grid, kThreads, 0, stream)(few_kernel<W>, p, packed);
}

}  // namespace

void multiply_grouped(const GroupedProduct& p, StreamHandle stream) {
  if (p.slots == 0 || p.rows == 0 || p.experts == 0) return;
  const bool matrix = p.x_type == p.w_type && p.x_type != DType::f32 && p.cols % 8 == 0;
  with_type(p.w_type, [&](auto* type) {
    using W = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    if constexpr (!std::is_same_v<W, float>) {
      if (matrix) return launch_matrix<W>(p, stream);
      if (p.x_type == p.w_type)
        return Launch(grid_of(p, kPlainTile), kThreads, 0, stream)(plain_kernel<W, W>, p);
    }
    if (p.x_type != DType::f32) throw RunError("expected operands of one type");
    Launch(grid_of(p, kPlainTile), kThreads, 0, stream)(plain_kernel<float, W>, p);
  });
}

void multiply_few_grouped(const GroupedProduct& p, int most_groups, StreamHandle stream) {
  if (p.slots == 0 || p.rows == 0 || most_groups == 0) return;
  with_type(p.w_type, [&](auto* type) {
    launch_few<std::remove_cv_t<std::remove_pointer_t<decltype(type)>>>(p, most_groups, stream);
  });
}

}  // namespace lode::cuda
