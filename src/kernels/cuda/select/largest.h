// SPDX-License-Identifier: Apache-2.0
// The k largest of one list, all k of them whatever the list holds.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Rising indices of the k largest scores, 1 <= k <= n; ties to the larger index. NaN and -inf are least, and
/// unlike in top_k chosen where there is nothing else. Device memory; `chosen` gets how many are neither.
void largest(const float* scores /*[n]*/, std::int64_t n, std::int32_t k, std::int32_t* rows /*[k]*/,
             std::int32_t* chosen /*[1]*/, StreamHandle stream);

}  // namespace lode::cuda
