// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/device/check.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128;

// A NaN on either side stays out of the peak and reaches the output through its weight.
__global__ void merge_kernel(float* output, const float* lse, const float* other, const float* other_lse,
                             int d) {
  const std::int64_t row = blockIdx.x;
  const float mine = lse[row], theirs = other_lse[row];
  if (theirs == -INFINITY) return;
  const float peak = fmaxf(mine, theirs);
  const float a = mine == -INFINITY ? 0.0f : expf(mine - peak), b = expf(theirs - peak), sum = a + b;
  for (int i = threadIdx.x; i < d; i += kThreads) {
    float& x = output[row * d + i];
    x = (a == 0.0f ? 0.0f : x * (a / sum)) + other[row * d + i] * (b / sum);
  }
}

// A part whose lse is NaN makes the row NaN.
__global__ void merge_parts_kernel(const float* outputs, const float* lse, int parts, int d, float* to,
                                   float* to_lse) {
  const std::int64_t row = blockIdx.x, rows = gridDim.x;
  float peak = -INFINITY, sum = 0.0f;
  for (int p = 0; p < parts; ++p) peak = fmaxf(peak, lse[p * rows + row]);
  const float base = peak == -INFINITY ? 0.0f : peak;
  for (int p = 0; p < parts; ++p) sum += expf(lse[p * rows + row] - base);
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
    float x = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float own = lse[p * rows + row];
      if (own != -INFINITY) x += expf(own - base) / sum * outputs[(p * rows + row) * d + i];
    }
    to[row * d + i] = x;
  }
  if (to_lse != nullptr && threadIdx.x == 0) to_lse[row] = base + logf(sum);
}

struct Three {
  StatePart parts[3];
  int count;
};

// A part whose lse is NaN makes the row NaN.
__global__ void merge_three_kernel(const Three three, int d, float* to) {
  const std::int64_t row = blockIdx.x;
  float lse[3], peak = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    lse[p] = p < three.count ? three.parts[p].lse[row] : -INFINITY;
    peak = fmaxf(peak, lse[p]);
  }
  const float base = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
  for (int p = 0; p < 3; ++p) sum += lse[p] == -INFINITY ? 0.0f : expf(lse[p] - base);
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
    float x = 0.0f;
#pragma unroll
    for (int p = 0; p < 3; ++p)
      if (lse[p] != -INFINITY) x += expf(lse[p] - base) / sum * three.parts[p].output[row * d + i];
    to[row * d + i] = x;
  }
}

}  // namespace

void merge_three(const StatePart (&parts)[3], int count, std::int64_t rows, int d, float* to,
                 StreamHandle stream) {
  if (rows == 0) return;
  merge_three_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      {{parts[0], parts[1], parts[2]}, count}, d, to);
  LODE_LAUNCHED();
}

void merge_parts(const float* outputs, const float* lse, int parts, std::int64_t rows, int d, float* to,
                 float* to_lse, StreamHandle stream) {
  if (rows == 0) return;
  merge_parts_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(outputs, lse, parts, d, to,
                                                                           to_lse);
  LODE_LAUNCHED();
}

void merge_states(float* output, const float* lse, const float* other, const float* other_lse,
                  std::int64_t rows, int d, StreamHandle stream) {
  if (rows == 0) return;
  merge_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(output, lse, other, other_lse, d);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
