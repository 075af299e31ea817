// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products in float32 for any weight type: a warp makes one pair of rows at a time, its lanes
// share the columns, and each weight is read once for all input rows. The sum of an output depends on its row
// and its input row alone, so batches of any size give the same bits.
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ double sum_of_block(double x, double* shared /*[kWarps]*/) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  return sum;
}

/// 1 / sqrt(mean square + eps) of each row, by the whole block.
template <int N>
__device__ void inverse_norms(const StepInput& in, float (&inverse)[N]) {
  __shared__ double shared[kWarps];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r >= in.n) break;
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < in.cols; i += kThreads) {
      const double x = in.x[r * in.cols + i];
      sum += x * x;
    }
    sum = sum_of_block(sum, shared);
    inverse[r] =
        static_cast<float>(1.0 / sqrt(sum / static_cast<double>(in.cols) + static_cast<double>(in.eps)));
  }
}

template <int N>
struct Sums {
  float a[N] = {}, b[N] = {};
};

/// The columns at `k`, as many as fill sixteen bytes of weights.
template <int N, class W>
__device__ __forceinline__ void add_pack(const StepInput& in, const RowPair<W>& rows, std::int64_t k,
                                         const float (&inverse)[N], Sums<N>& sums) {
  constexpr int kCount = kPack<W>;
  float wa[kCount], wb[kCount], gain[kCount];
  widen_pack<W>(__ldcs(reinterpret_cast<const uint4*>(rows.a + k)), wa);
  widen_pack<W>(rows.b ? __ldcs(reinterpret_cast<const uint4*>(rows.b + k)) : uint4{}, wb);
  if (in.gain.data) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gain[i] = in.gain[k + i];
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r >= in.n) break;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 raw = *reinterpret_cast<const float4*>(in.x + r * in.cols + k + i);
      const float x[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float h = in.gain.data ? x[j] * inverse[r] * gain[i + j] : x[j];
        sums.a[r] = fmaf(h, wa[i + j], sums.a[r]);
        sums.b[r] = fmaf(h, wb[i + j], sums.b[r]);
      }
    }
  }
}

/// One column, for widths that sixteen bytes do not divide.
template <int N, class W>
__device__ __forceinline__ void add_column(const StepInput& in, const RowPair<W>& rows, std::int64_t k,
                                           const float (&inverse)[N], Sums<N>& sums) {
  const float wa = widen(rows.a[k]), wb = rows.b ? widen(rows.b[k]) : 0.0f;
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r >= in.n) break;
    const float x = in.x[r * in.cols + k];
    const float h = in.gain.data ? x * inverse[r] * in.gain[k] : x;
    sums.a[r] = fmaf(h, wa, sums.a[r]);
    sums.b[r] = fmaf(h, wb, sums.b[r]);
  }
}

template <int N, class Step>
__global__ __launch_bounds__(kThreads) void dot_kernel(const Step step, const StepInput in, bool packed) {
  using W = typename Step::Weight;
  float inverse[N] = {};
  if (in.gain.data) inverse_norms<N>(in, inverse);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t p = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; p < step.pairs();
       p += std::int64_t{gridDim.x} * kWarps) {
    const RowPair<W> rows = step.pair(p);
    Sums<N> sums;
    if (packed) {
#pragma unroll 2
      for (std::int64_t k = lane * kPack<W>; k < in.cols; k += 32 * kPack<W>)
        add_pack<N, W>(in, rows, k, inverse, sums);
    } else {
      for (std::int64_t k = lane; k < in.cols; k += 32) add_column<N, W>(in, rows, k, inverse, sums);
    }
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r >= in.n) break;
      const float a = sum_of_warp(sums.a[r]), b = sum_of_warp(sums.b[r]);
      if (lane == r) step.finish(p, r, a, b, step.before(p, r));
    }
  }
}

bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}
template <class W>
bool weights_aligned(const PlainStep<W>& s) {
  return aligned(s.w);
}
template <class W>
bool weights_aligned(const GateUpStep<W>& s) {
  return aligned(s.gate) && aligned(s.up);
}
template <class W>
bool weights_aligned(const QkvStep<W>& s) {
  return aligned(s.q) && aligned(s.k) && aligned(s.v);
}

}  // namespace

template <class Step>
void dot_rows(const Step& step, const StepInput& input, StreamHandle stream) {
  const bool packed = input.cols % kPack<typename Step::Weight> == 0 && input.cols % 4 == 0 &&
                      aligned(input.x) && weights_aligned(step);
  const std::int64_t wanted = (step.pairs() + kWarps - 1) / kWarps;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(wanted, 8 * device_shape().multiprocessors));
  if (blocks == 0 || input.n == 0) return;
  if (input.n == 1)
    Launch(blocks, kThreads, 0, stream)(dot_kernel<1, Step>, step, input, packed);
  else if (input.n <= 4)
    Launch(blocks, kThreads, 0, stream)(dot_kernel<4, Step>, step, input, packed);
  else
    Launch(blocks, kThreads, 0, stream)(dot_kernel<kFusedRows, Step>, step, input, packed);
}

#define LODE_STEP(W)                                                            \
  template void dot_rows(const PlainStep<W>&, const StepInput&, StreamHandle);  \
  template void dot_rows(const GateUpStep<W>&, const StepInput&, StreamHandle); \
  template void dot_rows(const QkvStep<W>&, const StepInput&, StreamHandle)
LODE_STEP(float);
LODE_STEP(__half);
LODE_STEP(__nv_bfloat16);
#undef LODE_STEP

}  // namespace lode::cuda
