// SPDX-License-Identifier: Apache-2.0
// What stands between the products of many rows: norm, rounding, bias, rotation and append, activation.
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, 65536));
}

__global__ void norm_kernel(const StepInput in, void* to, DType type) {
  __shared__ double partial[kThreads / 32];
  const float* x = in.x + std::int64_t{blockIdx.x} * in.cols;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < in.cols; i += kThreads) sum += double{x[i]} * double{x[i]};
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const double p : partial) sum += p;
  const auto inverse =
      static_cast<float>(1.0 / sqrt(sum / static_cast<double>(in.cols) + static_cast<double>(in.eps)));
  for (std::int64_t i = threadIdx.x; i < in.cols; i += kThreads)
    store_as(to, type, std::int64_t{blockIdx.x} * in.cols + i, x[i] * inverse * in.gain[i]);
}

__global__ void convert_kernel(const float* x, std::int64_t count, void* to, DType type) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads)
    store_as(to, type, i, x[i]);
}

__global__ void add_bias_kernel(float* y, std::int64_t count, std::int64_t cols, const Vector bias) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads)
    y[i] += bias[i % cols];
}

__global__ void finish_qkv_kernel(const QkvStep<float> step, std::int64_t n, const float* q, const float* k,
                                  const float* v) {
  const std::int64_t pairs = step.pairs();
  const int half = step.half;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < n * pairs;
       at += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = at / pairs, p = at % pairs;
    std::int64_t head = p / half, heads = step.kv_heads;
    const float* from = v;
    if (head < step.query_heads) {
      from = q;
      heads = step.query_heads;
    } else if (head < step.query_heads + step.kv_heads) {
      from = k;
      head -= step.query_heads;
    } else {
      head -= step.query_heads + step.kv_heads;
    }
    from += (row * heads + head) * 2 * half + p % half;
    step.finish(p, row, from[0], from[half], step.before(p, row));
  }
}

__device__ __forceinline__ double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// One warp for each head of each row. Where tokens stand is looked up while the products in front are still made.
/// kMost: pairs of a lane, 32 times as many of a head.
template <int kMost>
__global__ void finish_heads_kernel(QkvStep<float> step, const HeadNorms norms, std::int64_t n,
                                    const float* q, const float* k, const float* v) {
  const int all = step.query_heads + 2 * step.kv_heads, half = step.half, d = 2 * half,
            lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t at = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (at >= n * all) return;
  const std::int64_t row = at / all;
  int head = static_cast<int>(at % all), heads = step.query_heads;
  const float* from = q;
  Vector bias = step.q_bias, gain = norms.q_gain;
  bool normed_values = false;
  const bool query = head < step.query_heads;
  const std::int64_t pair = std::int64_t{head} * half;  // the first one of the head, as the step counts
  if (!query) {
    head -= step.query_heads, heads = step.kv_heads;
    const bool key = head < step.kv_heads;
    if (!key) head -= step.kv_heads;
    from = key ? k : v, bias = key ? step.k_bias : step.v_bias, gain = key ? norms.k_gain : Vector{};
    normed_values = !key && norms.values;
  }
  QkvStep<float>::Before known[kMost];
  step.q_bias = step.k_bias = step.v_bias = {};
#pragma unroll
  for (int p = 0; p < kMost; ++p)
    if (lane + 32 * p < half) known[p] = step.before(pair + lane + 32 * p, row);
  release_successor();
  wait_for_predecessor();
  from += (row * heads + head) * d;
  const auto value = [&](int i) { return from[i] + bias.or_zero(std::int64_t{head} * d + i); };
  float factor = 1.0f, growth = 1.0f;
  const bool norm = gain.data != nullptr || normed_values;
  if (norm) {
    double sum = 0;
    for (int i = lane; i < d; i += 32) sum += double{value(i)} * double{value(i)};
    factor = static_cast<float>(1.0 / sqrt(warp_sum(sum) / d + static_cast<double>(norms.eps)));
  }
  if (query && norms.growth != 0.0f)
    growth = static_cast<float>(
        1.0 + static_cast<double>(norms.growth) *
                  log1p(static_cast<double>(step.tokens[row].position / norms.growth_start)));
  const auto normed = [&](int i) {
    const float normal = norm ? value(i) * factor : value(i),
                x = gain.data != nullptr ? normal * gain[i] : normal;
    return growth == 1.0f ? x : x * growth;
  };
#pragma unroll
  for (int p = 0; p < kMost; ++p) {
    const int i = lane + 32 * p;
    if (i < half) step.finish(pair + i, row, normed(i), normed(i + half), known[p]);
  }
}

__global__ void add_scaled_kernel(const StepInput y, float multiplier, float factor, float* x) {
  __shared__ double partial[kThreads / 32];
  const float* from = y.x + std::int64_t{blockIdx.x} * y.cols;
  float* to = x + std::int64_t{blockIdx.x} * y.cols;
  float inverse = 1.0f;
  if (y.gain.data != nullptr) {
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < y.cols; i += kThreads) sum += double{from[i]} * double{from[i]};
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (const double p : partial) sum += p;
    inverse = static_cast<float>(1.0 / sqrt(sum / static_cast<double>(y.cols) + static_cast<double>(y.eps)));
  }
  for (std::int64_t i = threadIdx.x; i < y.cols; i += kThreads) {
    const float h = y.gain.data != nullptr ? from[i] * inverse * y.gain[i] : from[i];
    to[i] = __fmul_rn(__fadd_rn(to[i], __fmul_rn(h, multiplier)), factor);
  }
}

__global__ void scale_and_cap_kernel(float* x, std::int64_t count, float factor, float cap) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const float scaled = x[i] * factor;
    x[i] = cap > 0.0f ? cap * tanhf(scaled / cap) : scaled;
  }
}

__global__ void finish_gate_up_kernel(const GateUpStep<float> step, std::int64_t count, const float* gate,
                                      const float* up) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads)
    step.finish(i % step.rows, i / step.rows, gate[i], up[i], step.before(i % step.rows, i / step.rows));
}

}  // namespace

void norm_rows(const StepInput& input, void* to, DType type, StreamHandle stream) {
  if (input.n == 0) return;
  Launch(static_cast<unsigned>(input.n), kThreads, 0, stream)(norm_kernel, input, to, type);
}

void convert(const float* x, std::int64_t count, void* to, DType type, StreamHandle stream) {
  if (count == 0) return;
  Launch(blocks_for(count), kThreads, 0, stream)(convert_kernel, x, count, to, type);
}

void add_bias(float* y, std::int64_t n, std::int64_t cols, const Vector& bias, StreamHandle stream) {
  if (n == 0 || bias.data == nullptr) return;
  Launch(blocks_for(n * cols), kThreads, 0, stream)(add_bias_kernel, y, n * cols, cols, bias);
}

void finish_qkv(const QkvStep<float>& step, std::int64_t n, const float* q, const float* k, const float* v,
                StreamHandle stream) {
  if (n == 0) return;
  Launch(blocks_for(n * step.pairs()), kThreads, 0, stream)(finish_qkv_kernel, step, n, q, k, v);
}

void finish_heads(const QkvStep<float>& step, const HeadNorms& norms, std::int64_t n, const float* q,
                  const float* k, const float* v, StreamHandle stream) {
  if (n == 0) return;
  const std::int64_t heads = n * (step.query_heads + 2 * step.kv_heads);
  constexpr int kHeads = kThreads / 32;
  const EarlyLaunch launch(dim3(static_cast<unsigned>((heads + kHeads - 1) / kHeads)), kThreads, 0, 1,
                           stream);
  constexpr int kUsual = 4, kLarge = 8;
  LODE_ASSERT(step.half <= 32 * kLarge);
  step.half <= 32 * kUsual ? launch(finish_heads_kernel<kUsual>, step, norms, n, q, k, v)
                           : launch(finish_heads_kernel<kLarge>, step, norms, n, q, k, v);
}

void add_scaled(const float* y, std::int64_t n, std::int64_t cols, const Addition& addition, float* x,
                StreamHandle stream) {
  if (n == 0) return;
  Launch(static_cast<unsigned>(n), kThreads, 0, stream)(add_scaled_kernel,
                                                        {y, vector_of(addition.norm), addition.eps, n, cols},
                                                        addition.multiplier, addition.factor, x);
}

void scale_and_cap(float* x, std::int64_t count, float factor, float cap, StreamHandle stream) {
  if (count == 0 || (factor == 1.0f && cap == 0.0f)) return;
  Launch(blocks_for(count), kThreads, 0, stream)(scale_and_cap_kernel, x, count, factor, cap);
}

void finish_gate_up(const GateUpStep<float>& step, std::int64_t n, const float* gate, const float* up,
                    StreamHandle stream) {
  if (n == 0) return;
  Launch(blocks_for(n * step.rows), kThreads, 0, stream)(finish_gate_up_kernel, step, n * step.rows, gate,
                                                         up);
}

const DeviceShape& device_shape() {
  static const DeviceShape shape = [] {
    DeviceShape found;
    int device = 0;
    LODE_CUDA(cudaGetDevice(&device));
    const auto ask = [&](cudaDeviceAttr what, int& to) {
      LODE_CUDA(cudaDeviceGetAttribute(&to, what, device));
    };
    ask(cudaDevAttrMultiProcessorCount, found.multiprocessors);
    ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, found.shared_bytes);
    return found;
  }();
  return shape;
}

}  // namespace lode::cuda
