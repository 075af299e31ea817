// SPDX-License-Identifier: Apache-2.0
// Attention of many queries to keys that all of them see: a document that is read once for all who ask.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/merge_states.h"

namespace lode::cuda {

/// Device memory that attend_shared needs for so many queries.
std::int64_t shared_workspace_bytes(int queries, int query_heads, int head_dim);

/// Every query attends to keys [0, keys) of the first query's sequence, wherever it stands itself. Keys are cut
/// into parts by their number and that of KV heads alone, so a query's bits do not depend on who else asks. Up
/// to 128 / group queries read the keys once. The states of the parts lie in the workspace until the next call
/// (o and lse of `queries` are not used).
StatePlanes attend_shared(const Queries& queries, std::int64_t keys, void* workspace, StreamHandle stream,
                          Precision precision = Precision::fast);

}  // namespace lode::cuda
