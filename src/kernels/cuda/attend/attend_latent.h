// SPDX-License-Identifier: Apache-2.0
// Attention over rows that all heads share and that are keys and values at once (KvLayout::shared_rows), on the matrix
// unit: for stores of bf16 and f16 and rows of 288 or 576 numbers. A row is read once for up to 64 query heads.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/prefill.h"

namespace lode::cuda {

/// As attend_full_decode and attend_rows_decode (`lists` not null); false, and nothing is enqueued, for other rows and
/// stores. What the workspace holds does not matter.
bool attend_latent_decode(const Queries& queries, const RowLists* lists, std::int64_t max_tokens,
                          void* workspace, StreamHandle stream);
std::int64_t latent_workspace_bytes(int queries, int query_heads, int head_dim);

/// As attend_prefill_mma.
bool attend_latent_prefill(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                           StreamHandle stream);

}  // namespace lode::cuda
