// SPDX-License-Identifier: Apache-2.0
// Attention of many query tokens over what is chosen for all of them together.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// Device memory that attend_rows_prefill needs for partial results.
std::int64_t rows_prefill_workspace_bytes(int head_dim);

/// As attend_prefill, over what is chosen for all of these tokens together: `lists` has one list for each KV
/// head, of rows in front of the first token's window. A token attends the sink, its head's list, and every
/// key from the first token's window on up to itself. A list is cut among blocks by the numbers of tokens and
/// heads, and that decides the last bits; neighbours and what they hold do not.
void attend_rows_prefill(const Queries& queries, std::int32_t position, const RowLists& lists,
                         void* workspace, StreamHandle stream, Precision precision = Precision::fast);

}  // namespace lode::cuda
