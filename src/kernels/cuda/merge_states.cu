// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/merge_states.h"

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

}  // namespace

void merge_states(float* output, const float* lse, const float* other, const float* other_lse,
                  std::int64_t rows, int d, StreamHandle stream) {
  if (rows == 0) return;
  merge_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(output, lse, other, other_lse, d);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
