// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/linear/tile_stream.cuh"
#include "kernels/cuda/linear/tile_stream.h"

namespace lode::cuda::tiles {

template <>
void stream_format<TileFormat::mxfp4>(const TileStep& step, const StepInput& input, StreamHandle stream) {
  launch_rows<TileFormat::mxfp4>(step, input, stream);
}

}  // namespace lode::cuda::tiles
