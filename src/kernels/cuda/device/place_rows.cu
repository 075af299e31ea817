// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/place_rows.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 64;

/// A block a row. Rows are whole words: heads have even dimensions, which RoPE turns in pairs.
__global__ void place_kernel(char* base, KvLayout layout, const std::int64_t* places, const char* rows) {
  const int words = static_cast<int>(layout.row_bytes() / 4);
  const auto* const from = reinterpret_cast<const unsigned*>(rows) + std::int64_t{blockIdx.x} * 2 * words;
  char* const key = base + places[blockIdx.x];
  auto* const k = reinterpret_cast<unsigned*>(key);
  auto* const v = reinterpret_cast<unsigned*>(key + layout.value_offset());
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) {
    k[i] = from[i];
    v[i] = from[words + i];
  }
}

}  // namespace

void place_rows(char* base, const KvLayout& layout, const std::int64_t* places, const char* rows,
                std::int64_t count, StreamHandle stream) {
  if (count == 0) return;
  Launch(static_cast<unsigned>(count), kThreads, 0, stream)(place_kernel, base, layout, places, rows);
}

}  // namespace lode::cuda
