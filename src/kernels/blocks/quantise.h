// SPDX-License-Identifier: Apache-2.0
// Float32 numbers to GGUF's blocks, scales chosen for a small error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_type.h"

namespace lode {

/// Whether quantise() takes the type: F32, F16, BF16, Q8_0, Q4_K or Q6_K.
bool can_quantise(WeightType type);

/// n numbers, whole blocks, to `to`, which holds bytes_of(type, n). False when a number is not finite or so
/// large that a scale does not fit f16; `to` is then of no use.
bool quantise(WeightType type, const float* from, std::int64_t n, std::byte* to);

}  // namespace lode
