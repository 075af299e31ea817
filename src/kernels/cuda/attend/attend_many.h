// SPDX-License-Identifier: Apache-2.0
// Decode attention where lists have more pieces together than there are blocks at once.
#pragma once

#include "kernels/cuda/attend/tile_loop.cuh"

namespace lode::cuda {

/// Attends lists, or all keys where there are none, as the launch of a block for each piece does (attend.cu),
/// bit for bit, with blocks that take several pieces one after the other. False where there are few pieces, there is no kernel for the shape, or
/// a processor does not hold two blocks of it.
bool attend_many(const Params& p, StreamHandle stream);

}  // namespace lode::cuda
