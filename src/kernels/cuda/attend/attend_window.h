// SPDX-License-Identifier: Apache-2.0
// Attention of layers with a sliding window.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// As attend_prefill, where every token attends to the last `window` keys alone, its own included. Few tokens
/// do the same by attend_rows_decode with empty lists.
void attend_window_prefill(const Queries& queries, std::int32_t position, std::int64_t window,
                           StreamHandle stream, Precision precision = Precision::fast);

}  // namespace lode::cuda
