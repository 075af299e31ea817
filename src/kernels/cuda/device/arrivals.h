// SPDX-License-Identifier: Apache-2.0
// A caller's vectors on their way into the engine's layouts (all that a call brings, in one launch), and results on
// their way back.
#pragma once

#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// Rows [begin, end) of plain arrays of any strides, and where they go: to the same rows of a layer. Device memory.
struct TakenRows {
  StridedKv from;
  KvLayout layout;
  char* layer = nullptr;  ///< where it begins
  std::int64_t begin = 0, end = 0;
  std::int64_t first = 0;  ///< row of the layer that comes first in `from`
};

/// Query vectors, of which token t was turned by RoPE to position begin + t. Device memory.
struct TurnedQueries {
  const void* q = nullptr;  // [tokens, heads, d]
  DType type = DType::f32;
  const float* frequencies = nullptr;  // [d/2] radians per position
  std::int64_t begin = 0, tokens = 0;
  int heads = 0, d = 0;
  int turning = 0;                 ///< of d/2 pairs, the first; the others stay as they are
  float attention_scaling = 1.0f;  ///< by which RoPE has scaled the pairs that turn
  float* widened = nullptr;        // [tokens, heads, d] q in float32; null: not wanted
  float* plain = nullptr;          // [tokens, heads, d] as they were before RoPE; null: not wanted
  QueryToken* places = nullptr;    // [tokens] of sequence 0; null: not wanted
};

/// A plain launch: what is enqueued behind it may begin early (Queries).
void arrive(const TakenRows& rows, const TurnedQueries& queries, StreamHandle stream);
/// Writes `count` numbers in a caller's type, rounded to nearest even. Device memory. A plain launch.
void depart(const float* from, std::int64_t count, void* to, DType type, StreamHandle stream);

}  // namespace lode::cuda
