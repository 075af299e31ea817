// SPDX-License-Identifier: Apache-2.0
// Rows taken out of lists, where what they stand for is attended to from elsewhere.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// Takes rows from `end` on out of each list and lowers its count; rows of the list's end fill their places, so that
/// the order of the others changes, always alike. Of a list at most kBlockTokens rows lie there. Device memory.
void drop_rows(std::int32_t* rows /*[lists, capacity]*/, std::int32_t* counts /*[lists]*/,
               std::int64_t capacity, std::int64_t lists, std::int32_t end, StreamHandle stream);

}  // namespace lode::cuda
