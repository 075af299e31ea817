// SPDX-License-Identifier: Apache-2.0
// The kernels behind attend_prefill.
#pragma once

#include "kernels/cuda/attend.h"

namespace lode::cuda {

/// Any store, head dimension up to 256 and group, in float32.
void attend_prefill_f32(const Queries& queries, std::int32_t position, StreamHandle stream);

/// On the matrix unit, for stores of bf16 and f16 and heads of 64, 80, 96, 128 or 256 numbers; false, and
/// nothing is enqueued, for others and where shared memory is too small.
bool attend_prefill_mma(const Queries& queries, std::int32_t position, StreamHandle stream);

/// The same by Hopper's own instructions, for heads of 128 numbers; false where this is another GPU or
/// another head.
bool attend_prefill_hopper(const Queries& queries, std::int32_t position, StreamHandle stream);

}  // namespace lode::cuda
