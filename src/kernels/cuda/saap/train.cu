// SPDX-License-Identifier: Apache-2.0
// Work map: a block that sums over the batch owns 16 columns, 32 threads of it share a column's rows; the
// divergence is one block a row; the rest is one thread a number.
#include <cuda_fp16.h>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/over_block.cuh"
#include "kernels/cuda/saap/train.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = 16, kRowThreads = 32;

__global__ void take_kernel(const NetSteps steps, const float* q, std::int64_t n, std::int64_t d, float* x) {
  const std::int32_t* rows = steps.rows + steps.table[*steps.at].first_row;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n * d) x[i] = q[rows[i / d] * d + i % d];
}

/// The sum over the threads of a column, in a fixed order; every thread gets it.
__device__ __forceinline__ double column_sum(double mine, double (&scratch)[kRowThreads][kColumns + 1]) {
  __syncthreads();
  scratch[threadIdx.y][threadIdx.x] = mine;
  for (int rows = kRowThreads / 2; rows > 0; rows /= 2) {
    __syncthreads();
    if (threadIdx.y < rows) scratch[threadIdx.y][threadIdx.x] += scratch[threadIdx.y + rows][threadIdx.x];
  }
  __syncthreads();
  return scratch[0][threadIdx.x];
}

__global__ __launch_bounds__(kColumns* kRowThreads) void norm_kernel(const BatchNormArrays norm,
                                                                     const float* x, std::int64_t n,
                                                                     std::int64_t h, float* normalised,
                                                                     float* inverse, float* out) {
  __shared__ double scratch[kRowThreads][kColumns + 1];
  const std::int64_t col = std::int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const bool inside = col < h;
  if (norm.gain == nullptr) {
    if (!inside) return;
    for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads)
      out[row * h + col] = fmaxf(x[row * h + col] + norm.shift[col], 0.0f);
    return;
  }
  const float bias = inside ? norm.bias[col] : 0.0f;
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads)
    sum += inside ? x[row * h + col] + bias : 0.0f;
  const double mean = column_sum(sum, scratch) / static_cast<double>(n);
  double squares = 0.0;
#pragma unroll 8
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads) {
    const double from_mean = inside ? static_cast<double>(x[row * h + col] + bias) - mean : 0.0;
    squares += from_mean * from_mean;
  }
  squares = column_sum(squares, scratch);
  if (!inside) return;
  const auto inverse_deviation =
      static_cast<float>(1.0 / sqrt(squares / static_cast<double>(n) + norm.epsilon));
  if (threadIdx.y == 0) {
    inverse[col] = inverse_deviation;
    const auto blend = [&](float& running, double now) {
      running = static_cast<float>((1.0 - norm.momentum) * running + norm.momentum * now);
    };
    blend(norm.mean[col], mean);
    blend(norm.variance[col], squares / (static_cast<double>(n) - 1.0));
  }
  const float gain = norm.gain[col], shift = norm.shift[col], middle = static_cast<float>(mean);
#pragma unroll 8
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads) {
    const float z = (x[row * h + col] + bias - middle) * inverse_deviation;
    normalised[row * h + col] = z;
    out[row * h + col] = fmaxf(z * gain + shift, 0.0f);
  }
}

__global__ __launch_bounds__(kColumns* kRowThreads) void norm_backward_kernel(
    const BatchNormArrays norm, const float* normalised, const float* inverse, const float* out,
    std::int64_t n, std::int64_t h, float* dy, float* gain_gradient, float* shift_gradient) {
  __shared__ double scratch[kRowThreads][kColumns + 1];
  const std::int64_t col = std::int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const bool inside = col < h, normed = norm.gain != nullptr;
  double sum = 0.0, product = 0.0;
#pragma unroll 4
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads) {
    if (!inside) continue;
    const float slope = out[row * h + col] > 0.0f ? dy[row * h + col] : 0.0f;
    sum += slope;
    if (normed) product += static_cast<double>(slope) * normalised[row * h + col];
  }
  sum = column_sum(sum, scratch);
  product = column_sum(product, scratch);
  if (!inside) return;
  if (threadIdx.y == 0) {
    shift_gradient[col] = static_cast<float>(sum);
    if (normed) gain_gradient[col] = static_cast<float>(product);
  }
  const double count = static_cast<double>(n);
  const auto scale = normed ? static_cast<float>(norm.gain[col] * inverse[col]) : 1.0f;
  const auto mean = static_cast<float>(normed ? sum / count : 0.0),
             along = static_cast<float>(normed ? product / count : 0.0);
#pragma unroll 4
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads) {
    const float slope = out[row * h + col] > 0.0f ? dy[row * h + col] : 0.0f;
    const float z = normed ? normalised[row * h + col] : 0.0f;
    dy[row * h + col] = scale * (slope - mean - z * along);
  }
}

__global__ __launch_bounds__(kThreads) void divergence_kernel(const NetSteps steps, const __half* targets,
                                                              const float* bias, const float* other_bias,
                                                              std::int64_t n, std::int64_t c, float* y,
                                                              double* row_loss) {
  const std::int32_t example = steps.rows[steps.table[*steps.at].first_row + blockIdx.x];
  const __half* target = targets + example * c;
  float* row = y + std::int64_t{blockIdx.x} * c;
  float most = -INFINITY;
  for (std::int64_t i = threadIdx.x; i < c; i += kThreads) {
    const float z = row[i] + bias[i] + (other_bias != nullptr ? other_bias[i] : 0.0f);
    row[i] = z;
    most = fmaxf(most, z);
  }
  most = over_block<kWarps>(most, Max());
  double sum = 0.0, mass = 0.0, surprise = 0.0;  // surprise: sum of t (log t - (z - most))
  for (std::int64_t i = threadIdx.x; i < c; i += kThreads) {
    const float z = row[i] - most, t = __half2float(target[i]);
    sum += expf(z);
    mass += t;
    if (t > 0.0f) surprise += t * (logf(t) - z);
  }
  sum = over_block<kWarps>(sum, Sum());
  mass = over_block<kWarps>(mass, Sum());
  surprise = over_block<kWarps>(surprise, Sum());
  if (threadIdx.x == 0) row_loss[blockIdx.x] = surprise + mass * log(sum);
  const auto weight = 1.0f / static_cast<float>(n), share = static_cast<float>(mass / sum);
  for (std::int64_t i = threadIdx.x; i < c; i += kThreads)
    row[i] = weight * (share * expf(row[i] - most) - __half2float(target[i]));
}

__global__ __launch_bounds__(kColumns* kRowThreads) void columns_kernel(const float* y, std::int64_t n,
                                                                        std::int64_t c, float* sums,
                                                                        float* copy) {
  __shared__ double scratch[kRowThreads][kColumns + 1];
  const std::int64_t col = std::int64_t{blockIdx.x} * kColumns + threadIdx.x;
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t row = threadIdx.y; row < n; row += kRowThreads) sum += col < c ? y[row * c + col] : 0.0f;
  sum = column_sum(sum, scratch);
  if (threadIdx.y != 0 || col >= c) return;
  sums[col] = static_cast<float>(sum);
  if (copy != nullptr) copy[col] = static_cast<float>(sum);
}

__global__ void adam_kernel(const NetSteps steps, const AdamArrays a, std::int64_t count) {
  const NetStep step = steps.table[*steps.at];
  const std::int64_t i = 4 * (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const auto load = [&](const float* from, float(&to)[4]) {
    const float4 x = *reinterpret_cast<const float4*>(from + i);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  };
  const auto store = [&](const float(&from)[4], float* to) {
    *reinterpret_cast<float4*>(to + i) = make_float4(from[0], from[1], from[2], from[3]);
  };
  float value[4], first[4], second[4], gradient[4];
  load(a.value, value), load(a.first, first), load(a.second, second), load(a.gradient, gradient);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float g = gradient[j];
    first[j] = a.beta1 * first[j] + (1.0f - a.beta1) * g;
    second[j] = a.beta2 * second[j] + (1.0f - a.beta2) * g * g;
    value[j] = step.keep * value[j] - step.rate * first[j] / (sqrtf(second[j]) + step.epsilon);
  }
  store(value, a.value), store(first, a.first), store(second, a.second);
}

__global__ __launch_bounds__(kThreads) void end_kernel(const NetSteps steps, const double* row_loss,
                                                       std::int64_t n, double* losses) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) sum += row_loss[i];
  sum = over_block<kWarps>(sum, Sum());
  if (threadIdx.x != 0) return;
  losses[*steps.at] = sum / static_cast<double>(n);
  ++*steps.at;
}

dim3 column_blocks(std::int64_t columns) {
  return dim3(static_cast<unsigned>((columns + kColumns - 1) / kColumns));
}
const dim3 kColumnThreads(kColumns, kRowThreads);

}  // namespace

void take_batch(const NetSteps& steps, const float* q, std::int64_t n, std::int64_t d, float* x,
                StreamHandle stream) {
  Launch(static_cast<unsigned>((n * d + kThreads - 1) / kThreads), kThreads, 0, stream)(take_kernel, steps, q,
                                                                                        n, d, x);
}

void norm_relu(const BatchNormArrays& norm, const float* x, std::int64_t n, std::int64_t h, float* normalised,
               float* inverse, float* out, StreamHandle stream) {
  Launch(column_blocks(h), kColumnThreads, 0, stream)(norm_kernel, norm, x, n, h, normalised, inverse, out);
}

void norm_relu_backward(const BatchNormArrays& norm, const float* normalised, const float* inverse,
                        const float* out, std::int64_t n, std::int64_t h, float* dy, float* gain_gradient,
                        float* shift_gradient, StreamHandle stream) {
  Launch(column_blocks(h), kColumnThreads, 0, stream)(norm_backward_kernel, norm, normalised, inverse, out, n,
                                                      h, dy, gain_gradient, shift_gradient);
}

void divergence(const NetSteps& steps, const void* targets, const float* bias, const float* other_bias,
                std::int64_t n, std::int64_t c, float* y, double* row_loss, StreamHandle stream) {
  Launch(static_cast<unsigned>(n), kThreads, 0, stream)(
      divergence_kernel, steps, static_cast<const __half*>(targets), bias, other_bias, n, c, y, row_loss);
}

void sum_columns(const float* y, std::int64_t n, std::int64_t c, float* sums, float* copy,
                 StreamHandle stream) {
  Launch(column_blocks(c), kColumnThreads, 0, stream)(columns_kernel, y, n, c, sums, copy);
}

void adam(const NetSteps& steps, const AdamArrays& arrays, std::int64_t count, StreamHandle stream) {
  Launch(static_cast<unsigned>((count / 4 + kThreads - 1) / kThreads), kThreads, 0, stream)(
      adam_kernel, steps, arrays, count);
}

void end_step(const NetSteps& steps, const double* row_loss, std::int64_t n, double* losses,
              StreamHandle stream) {
  Launch(1, kThreads, 0, stream)(end_kernel, steps, row_loss, n, losses);
}

}  // namespace lode::cuda
