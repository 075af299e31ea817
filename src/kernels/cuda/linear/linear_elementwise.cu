// SPDX-License-Identifier: Apache-2.0
// What stands between the products of many rows: norm, rounding, bias, rotation and append, activation.
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
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

__global__ void finish_gate_up_kernel(const GateUpStep<float> step, std::int64_t count, const float* gate,
                                      const float* up) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads)
    step.finish(i % step.rows, i / step.rows, gate[i], up[i], step.before(i % step.rows, i / step.rows));
}

}  // namespace

void norm_rows(const StepInput& input, void* to, DType type, StreamHandle stream) {
  if (input.n == 0) return;
  norm_kernel<<<static_cast<unsigned>(input.n), kThreads, 0, stream>>>(input, to, type);
  LODE_LAUNCHED();
}

void convert(const float* x, std::int64_t count, void* to, DType type, StreamHandle stream) {
  if (count == 0) return;
  convert_kernel<<<blocks_for(count), kThreads, 0, stream>>>(x, count, to, type);
  LODE_LAUNCHED();
}

void add_bias(float* y, std::int64_t n, std::int64_t cols, const Vector& bias, StreamHandle stream) {
  if (n == 0 || bias.data == nullptr) return;
  add_bias_kernel<<<blocks_for(n * cols), kThreads, 0, stream>>>(y, n * cols, cols, bias);
  LODE_LAUNCHED();
}

void finish_qkv(const QkvStep<float>& step, std::int64_t n, const float* q, const float* k, const float* v,
                StreamHandle stream) {
  if (n == 0) return;
  finish_qkv_kernel<<<blocks_for(n * step.pairs()), kThreads, 0, stream>>>(step, n, q, k, v);
  LODE_LAUNCHED();
}

void finish_gate_up(const GateUpStep<float>& step, std::int64_t n, const float* gate, const float* up,
                    StreamHandle stream) {
  if (n == 0) return;
  finish_gate_up_kernel<<<blocks_for(n * step.rows), kThreads, 0, stream>>>(step, n * step.rows, gate, up);
  LODE_LAUNCHED();
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
