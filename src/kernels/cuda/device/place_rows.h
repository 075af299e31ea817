// SPDX-License-Identifier: Apache-2.0
// Keys and values put at scattered rows of a range.
#pragma once

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// Row i: the key rows[i, 0] goes to base + places[i] (KvLayout::key_offset), the value rows[i, 1] to the
/// value's place behind it. No two places are one. Device memory.
void place_rows(char* base, const KvLayout& layout, const std::int64_t* places /*[count]*/,
                const char* rows /*[count, 2, row_bytes]*/, std::int64_t count, StreamHandle stream);

}  // namespace lode::cuda
