// SPDX-License-Identifier: Apache-2.0
// Decode attention for any head dimension up to kMaxGenericDim and any type of key: plain, slow, and right.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_strided.h"

namespace lode::cuda {

inline constexpr int kMaxGenericDim = 640;

/// Every query attends sink, its lists and its window; without lists (null) all keys [0, position].
void attend_generic(const Queries& queries, const RowLists* lists, StreamHandle stream);
/// Every query attends to its lists of a caller's rows (attend_strided.h).
void attend_generic(const Queries& queries, const StridedKv& kv, const StridedLists& lists,
                    StreamHandle stream);

}  // namespace lode::cuda
