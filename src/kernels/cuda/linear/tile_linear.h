// SPDX-License-Identifier: Apache-2.0
// The steps of a layer over weights in tiles, for up to kTiledRows rows: which kernels, over which rows.
#pragma once

#include <algorithm>

#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/tile_steps.cuh"
#include "lodestone/error.h"

namespace lode::cuda {

/// Whether the kernels that stream tiles have room for inputs of such a weight.
bool streams_tiles(const DeviceWeight& w);
/// y = x w^T + bias (+ y), x normalised first where the input has a gain.
void stream_product(const DeviceWeight& w, const Vector& bias, const StepInput& input, float* y, bool add,
                    StreamHandle stream);
/// act = activation(gate) * up; both weights are of one format.
void stream_gate_up(const GateUpStep<float>& step, const DeviceWeight& gate, const DeviceWeight& up,
                    const StepInput& input, StreamHandle stream);
/// Rows of experts' steps that the kernels take at once; 0 where they have no room, or the matrix is not in tiles.
std::int64_t tile_expert_rows_at_once(const DeviceWeight& w);
/// y[slot, :] = x w^T + bias by the matrix of each slot's expert, of `count` that lie behind one another in w.
void stream_expert_product(const DeviceWeight& w, int count, const Vector& bias, const StepInput& input,
                           float* y, const ExpertTiles& experts, StreamHandle stream);
/// act[slot, :] = activation(gate, up); both weights are of one format.
void stream_expert_gate_up(const GateUpStep<float>& step, const DeviceWeight& gate, const DeviceWeight& up,
                           int count, const StepInput& input, const ExpertTiles& experts,
                           StreamHandle stream);
/// Whether pairs of a rotated head fill tiles.
bool streams_heads(const QkvStep<float>& step);
/// Queries, keys and values in as many launches as there are formats.
void stream_qkv(const QkvStep<float>& step, const DeviceWeight& q, const DeviceWeight& k,
                const DeviceWeight& v, const StepInput& input, StreamHandle stream);

/// Calls body(panel, first row) for the rows of a matrix in tiles, unpacked to `type` in `scratch`, as many at
/// a time as `bytes` hold.
template <class Body>
void for_panels(const DeviceWeight& w, DType type, void* scratch, std::int64_t bytes, StreamHandle stream,
                const Body& body) {
  const std::int64_t rows = bytes / (w.cols * bytes_of(type)) / kTileRows * kTileRows;
  LODE_ASSERT(rows > 0 || w.rows == 0);
  for (std::int64_t first = 0; first < w.rows; first += rows) {
    const std::int64_t some = std::min(rows, w.rows - first);
    unpack_tiles(w.tiles(), first, some, scratch, type, stream);
    body(Operand{scratch, type, some, w.cols}, first);
  }
}

}  // namespace lode::cuda
