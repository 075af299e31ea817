// SPDX-License-Identifier: Apache-2.0
// Which format's kernels stream a step over tiles. Each format's are compiled in a file of their own.
#include "kernels/cuda/linear/tile_stream.cuh"
#include "kernels/cuda/linear/tile_stream.h"

namespace lode::cuda {

int tile_rows_at_once(std::int64_t cols, TileFormat format) {
  const auto fits = [&](int head_bytes, int n) {
    return tiles::plan_for(cols, head_bytes, tile_bytes(format), n, tiles::kSums / 2).depth > 0;
  };
  if (fits(tiles::kHeadBytes<8>, 8)) return 8;
  if (fits(tiles::kHeadBytes<4>, 4)) return 4;
  return fits(tiles::kHeadBytes<1>, 1) ? 1 : 0;
}

void stream_tiles(const TileStep& step, const StepInput& input, StreamHandle stream) {
  if (input.n == 0 || step.count == 0) return;
  with_format(step.format, [&](auto f) { tiles::stream_format<f()>(step, input, stream); });
}

}  // namespace lode::cuda
