// SPDX-License-Identifier: Apache-2.0
// Products of many rows in float32, for parity with the CPU and where cuBLASLt is missing. Tiles of 128 x 128
// by 16 columns, eight by eight outputs a thread, the next tile's numbers loaded while one is multiplied.
// Every output is one chain of fused multiply-adds in ascending order of the columns, so its bits do not
// depend on the batch.
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kTile = 128, kDepth = 16, kPerThread = 8;
constexpr int kStride = kTile + 4;  // a shift of four banks a row

template <class T>
struct Source {
  const T* data = nullptr;  // [rows, cols]
  std::int64_t rows = 0, cols = 0;
  bool packed = false;  ///< eight columns can be loaded by 16-byte reads
};

/// Eight columns of one row, zero outside of the matrix.
template <class T>
__device__ __forceinline__ void load(const Source<T>& s, std::int64_t row, std::int64_t k, float (&out)[8]) {
  if (row < s.rows && k + 8 <= s.cols && s.packed) {
    const T* from = s.data + row * s.cols + k;
#pragma unroll
    for (int part = 0; part < 8 / kPack<T>; ++part) {
      float values[kPack<T>];
      widen_pack<T>(*reinterpret_cast<const uint4*>(from + part * kPack<T>), values);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) out[part * kPack<T> + i] = values[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out[i] = row < s.rows && k + i < s.cols ? widen(s.data[row * s.cols + k + i]) : 0.0f;
}

__device__ __forceinline__ void load_fragment(const float* from, int lane, float (&out)[kPerThread]) {
  const float4 low = *reinterpret_cast<const float4*>(from + lane * 4);
  const float4 high = *reinterpret_cast<const float4*>(from + kTile / 2 + lane * 4);
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

template <class X, class W>
__global__ __launch_bounds__(kThreads, 2) void gemm_kernel(const Source<X> x, const Source<W> w,
                                                           const Vector bias, bool add, float* y,
                                                           std::int64_t stride) {
  __shared__ __align__(16) float xs[kDepth][kStride], ws[kDepth][kStride];
  const int tid = static_cast<int>(threadIdx.x);
  const int load_row = tid / 2, load_k = tid % 2 * 8, tx = tid % 16, ty = tid / 16;
  const std::int64_t x0 = std::int64_t{blockIdx.y} * kTile, w0 = std::int64_t{blockIdx.x} * kTile;
  float sums[kPerThread][kPerThread] = {};
  float next_x[8], next_w[8];
  load(x, x0 + load_row, load_k, next_x);
  load(w, w0 + load_row, load_k, next_w);
  for (std::int64_t k = 0; k < x.cols; k += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      xs[load_k + i][load_row] = next_x[i];
      ws[load_k + i][load_row] = next_w[i];
    }
    __syncthreads();
    if (k + kDepth < x.cols) {
      load(x, x0 + load_row, k + kDepth + load_k, next_x);
      load(w, w0 + load_row, k + kDepth + load_k, next_w);
    }
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      float a[kPerThread], b[kPerThread];
      load_fragment(xs[j], ty, a);
      load_fragment(ws[j], tx, b);
#pragma unroll
      for (int r = 0; r < kPerThread; ++r)
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) sums[r][c] = fmaf(a[r], b[c], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    const std::int64_t row = x0 + r / 4 * (kTile / 2) + ty * 4 + r % 4;
    if (row >= x.rows) continue;
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const std::int64_t col = w0 + c / 4 * (kTile / 2) + tx * 4 + c % 4;
      if (col >= w.rows) continue;
      float* to = y + row * stride + col;
      const float value = sums[r][c] + bias.or_zero(col);
      *to = add ? *to + value : value;
    }
  }
}

template <class T>
Source<T> source(const Operand& o) {
  const bool packed = o.cols % kPack<T> == 0 && reinterpret_cast<std::uintptr_t>(o.data) % 16 == 0;
  return {static_cast<const T*>(o.data), o.rows, o.cols, packed};
}

template <class X, class W>
void launch(const Operand& x, const Operand& w, const Vector& bias, bool add, float* y, StreamHandle stream,
            std::int64_t stride) {
  const dim3 grid(static_cast<unsigned>((w.rows + kTile - 1) / kTile),
                  static_cast<unsigned>((x.rows + kTile - 1) / kTile));
  Launch(grid, kThreads, 0, stream)(gemm_kernel<X, W>, source<X>(x), source<W>(w), bias, add, y, stride);
}

}  // namespace

void gemm_f32(const Operand& x, const Operand& w, const Vector& bias, bool add, float* y, StreamHandle stream,
              std::int64_t stride) {
  if (x.rows == 0 || w.rows == 0) return;
  if (stride == 0) stride = w.rows;
  if (x.type == DType::bf16 && w.type == DType::bf16)
    launch<__nv_bfloat16, __nv_bfloat16>(x, w, bias, add, y, stream, stride);
  else if (x.type == DType::f16 && w.type == DType::f16)
    launch<__half, __half>(x, w, bias, add, y, stream, stride);
  else if (x.type != DType::f32)
    throw RunError("expected operands of one type");
  else if (w.type == DType::bf16)
    launch<float, __nv_bfloat16>(x, w, bias, add, y, stream, stride);
  else if (w.type == DType::f16)
    launch<float, __half>(x, w, bias, add, y, stream, stride);
  else
    launch<float, float>(x, w, bias, add, y, stream, stride);
}

}  // namespace lode::cuda
