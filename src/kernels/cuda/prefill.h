// SPDX-License-Identifier: Apache-2.0
// The kernels behind attend_prefill.
#pragma once

#include "kernels/cuda/attend.h"

namespace lode::cuda {

/// Any store, head dimension up to 256 and group, in float32.
void attend_prefill_f32(const Queries& queries, std::int32_t position, StreamHandle stream);

}  // namespace lode::cuda
