// SPDX-License-Identifier: Apache-2.0
// States of attention over disjoint keys, computed in two places, made one (lodestone/attention.h).
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// output[r, :] := the merge of (output, lse)[r] with (other, other_lse)[r], in this order; an empty side
/// (-inf) changes nothing. Device memory.
void merge_states(float* output /*[rows, d]*/, const float* lse /*[rows]*/, const float* other /*[rows, d]*/,
                  const float* other_lse /*[rows]*/, std::int64_t rows, int d, StreamHandle stream);

/// to[r, :] := the merge of outputs[p, r, :] with lse[p, r] over all parts p, in their order; to_lse null
/// when not wanted. At most 16 parts.
void merge_parts(const float* outputs /*[parts, rows, d]*/, const float* lse /*[parts, rows]*/, int parts,
                 std::int64_t rows, int d, float* to /*[rows, d]*/, float* to_lse /*[rows]*/,
                 StreamHandle stream);

/// A state of each row over keys of its own.
struct StatePart {
  const float* output = nullptr;  // [rows, d]
  const float* lse = nullptr;     // [rows]
};
/// to[r, :] := the merge of `count` of these states, up to three, in their order; `to` may be the first one's
/// output.
void merge_three(const StatePart (&parts)[3], int count, std::int64_t rows, int d, float* to,
                 StreamHandle stream);

}  // namespace lode::cuda
