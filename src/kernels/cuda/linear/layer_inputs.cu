// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/layer_inputs.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// A warp a token and layer.
__global__ __launch_bounds__(kThreads) void join_kernel(std::int64_t rows, std::int64_t width, float scale,
                                                        const Vector gain, float eps, const float* embedded,
                                                        float* made) {
  constexpr float kHalf = 0.70710678118654752f;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const to = made + row * width;
  double sum = 0;
  for (std::int64_t i = lane; i < width; i += 32) {
    const float x = to[i] * scale;
    sum += double{x} * double{x};
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  const auto inverse =
      static_cast<float>(1.0 / sqrt(sum / static_cast<double>(width) + static_cast<double>(eps)));
  for (std::int64_t i = lane; i < width; i += 32)
    to[i] = (to[i] * scale * inverse * gain[i] + embedded[row * width + i]) * kHalf;
}

__global__ __launch_bounds__(kThreads) void weigh_kernel(const LayerInputs sizes, const float* made,
                                                         std::int64_t layer, const Activation activation,
                                                         float* gates) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= sizes.tokens * sizes.width) return;
  const std::int64_t token = i / sizes.width, column = i % sizes.width;
  gates[i] = activate(activation, gates[i], made[(token * sizes.layers + layer) * sizes.width + column]);
}

unsigned blocks_for(std::int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

void join_inputs(const LayerInputs& sizes, float scale, const DeviceWeight& gain, float eps,
                 const float* embedded, float* made, StreamHandle stream) {
  if (sizes.numbers() == 0) return;
  const std::int64_t rows = sizes.tokens * sizes.layers;
  Launch(blocks_for(rows, kWarps), kThreads, 0, stream)(join_kernel, rows, sizes.width, scale,
                                                        vector_of(gain), eps, embedded, made);
}

void weigh_inputs(const LayerInputs& sizes, const float* made, std::int64_t layer,
                  const Activation& activation, float* gates, StreamHandle stream) {
  if (sizes.numbers() == 0) return;
  Launch(blocks_for(sizes.tokens * sizes.width, kThreads), kThreads, 0, stream)(weigh_kernel, sizes, made,
                                                                                layer, activation, gates);
}

}  // namespace lode::cuda
