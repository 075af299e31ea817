// SPDX-License-Identifier: Apache-2.0
// Decode attention of heads of 512 numbers.
#pragma once

#include "kernels/cuda/attend/tile_loop.cuh"

namespace lode::cuda {

/// Of lists that share_out has cut; false, and nothing is enqueued, for other heads, float32 keys and groups of more
/// than 16.
bool attend_large(const Params& p, StreamHandle stream);

}  // namespace lode::cuda
