// SPDX-License-Identifier: Apache-2.0
// A caller's vectors on their way into the engine's layouts.
#pragma once

#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// Copies rows [begin, end) of plain arrays of any strides to the same rows of a layer that begins at `layer`. A plain
/// launch: what is enqueued behind it may begin early (Queries).
void take_rows(const StridedKv& from, const KvLayout& layout, char* layer, std::int64_t begin,
               std::int64_t end, StreamHandle stream);

/// Vectors as they were before RoPE turned those of token t to position begin + t. Device memory.
struct TurnedVectors {
  const float* x = nullptr;            // [tokens, heads, d]
  const float* frequencies = nullptr;  // [d/2] radians per position
  std::int64_t begin = 0, tokens = 0;
  int heads = 0, d = 0;
  int turning = 0;                 ///< of d/2 pairs, the first; the others stay as they are
  float attention_scaling = 1.0f;  ///< by which RoPE has scaled the pairs that turn
};
void unrotate_rows(const TurnedVectors& from, float* to /*[tokens, heads, d]*/, StreamHandle stream);

}  // namespace lode::cuda
