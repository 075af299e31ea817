// SPDX-License-Identifier: Apache-2.0
// States of attention over disjoint keys, computed in two places, made one (lodestone/attention.h).
#pragma once

#include <span>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// output[r, :] := the merge of (output, lse)[r] with (other, other_lse)[r], in this order; an empty side
/// (-inf) changes nothing. Device memory.
void merge_states(float* output /*[rows, d]*/, const float* lse /*[rows]*/, const float* other /*[rows, d]*/,
                  const float* other_lse /*[rows]*/, std::int64_t rows, int d, StreamHandle stream);

/// Merges a key of no value into every row: with score sinks[r % heads] of query head r % heads.
void merge_sinks(float* output /*[rows, d]*/, float* lse /*[rows]*/, const float* sinks /*[heads]*/,
                 std::int64_t rows, int heads, int d, StreamHandle stream);

/// A state of each row over keys of its own.
struct StatePart {
  const float* output = nullptr;  // [rows, d]
  const float* lse = nullptr;     // [rows]
};
inline constexpr int kMostMerged = 16;
/// to[r, :] := the merge of row r of all parts, kMostMerged at most, in their order; `to_lse` null when not wanted.
/// `to` and `to_lse` may be those of a part.
void merge_parts(std::span<const StatePart> parts, std::int64_t rows, int d, float* to /*[rows, d]*/,
                 float* to_lse /*[rows]*/, StreamHandle stream);
/// The same of parts side by side.
void merge_parts(const float* outputs /*[parts, rows, d]*/, const float* lse /*[parts, rows]*/, int parts,
                 std::int64_t rows, int d, float* to /*[rows, d]*/, float* to_lse /*[rows]*/,
                 StreamHandle stream);

/// States of all rows over `count` parts of the keys, one plane a part.
struct StatePlanes {
  const float* outputs = nullptr;  // [count, rows, d]
  const float* lse = nullptr;      // [count, rows]
  int count = 0;
};
/// Where a result [rows, d] goes besides, each number as the sum of two bf16: the high parts, and
/// the low parts `low` numbers behind them.
struct SplitResult {
  void* to = nullptr;
  std::int64_t low = 0;
};
/// to[r, :] := the merge of up to 16 planes, then of `count` states, up to three, in their order; `to` may be one of
/// their outputs.
void merge_planes(const StatePlanes& planes, const StatePart (&parts)[3], int count, std::int64_t rows, int d,
                  float* to, const SplitResult& split, StreamHandle stream);

}  // namespace lode::cuda
