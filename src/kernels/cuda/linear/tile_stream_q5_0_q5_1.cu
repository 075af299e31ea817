// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/linear/tile_stream.cuh"
#include "kernels/cuda/linear/tile_stream.h"

namespace lode::cuda::tiles {

template <>
void stream_format<TileFormat::q5_0>(const TileStep& step, const StepInput& input, StreamHandle stream) {
  launch_rows<TileFormat::q5_0>(step, input, stream);
}
template <>
void stream_format<TileFormat::q5_1>(const TileStep& step, const StepInput& input, StreamHandle stream) {
  launch_rows<TileFormat::q5_1>(step, input, stream);
}

}  // namespace lode::cuda::tiles
