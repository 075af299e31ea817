// SPDX-License-Identifier: Apache-2.0
// Attention of layers with a sliding window: every query attends to the last `window` keys, its own included.
// Nothing there is far, so no method takes part.
#pragma once

#include <span>

#include "attend/attend.h"

namespace lode {

/// o[b][t, h, :] for every query token of every block. `tails` holds one a block, or is empty. The bits of a
/// block depend on that block alone. `work` has one a block, to add to.
void attend_window(std::span<const QueryBlock> blocks, std::span<const TailRows> tails,
                   const LayerGeometry& geometry, std::int64_t window, std::span<float* const> outputs,
                   std::span<AttendWork> work, std::span<float* const> lse = {});

}  // namespace lode
