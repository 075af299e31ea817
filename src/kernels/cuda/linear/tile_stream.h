// SPDX-License-Identifier: Apache-2.0
// The kernels of one format, compiled apart so that they compile beside one another.
#pragma once

#include "kernels/cuda/linear/tile_steps.cuh"

namespace lode::cuda::tiles {

template <TileFormat F>
void stream_format(const TileStep& step, const StepInput& input, StreamHandle stream);

}  // namespace lode::cuda::tiles
