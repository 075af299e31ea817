// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void list_window_kernel(const WindowRows in, std::int32_t* rows,
                                                               std::int32_t* counts) {
  const std::int64_t list = blockIdx.x, token = list / in.kv_heads;
  const std::int64_t position = in.absolute[token].position, seam = position - in.in_tail[token].position,
                     first = position + 1 > in.window ? position + 1 - in.window : 0,
                     count = seam > first ? seam - first : 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads)
    rows[list * in.capacity + i] = static_cast<std::int32_t>(first + i);
  if (threadIdx.x == 0) counts[list] = static_cast<std::int32_t>(count);
}

}  // namespace

void list_window(const WindowRows& in, int count, std::int32_t* rows, std::int32_t* counts,
                 StreamHandle stream) {
  if (count == 0) return;
  Launch(static_cast<unsigned>(count * in.kv_heads), kThreads, 0, stream)(list_window_kernel, in, rows,
                                                                          counts);
}

}  // namespace lode::cuda
