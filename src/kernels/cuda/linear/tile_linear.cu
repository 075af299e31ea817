// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/linear/tile_linear.h"
#include "kernels/cuda/linear/tile_steps.cuh"

namespace lode::cuda {

namespace {

unsigned row_tile_bytes(const DeviceWeight& w) {
  return static_cast<unsigned>(tiled_bytes(w.format, kTileRows, w.cols));
}

TileStep step_of(TileStep::Kind kind, const DeviceWeight& w) {
  TileStep step;
  step.kind = kind;
  step.format = w.format;
  step.row_tile_bytes = row_tile_bytes(w);
  return step;
}

/// A step's outputs for rows from `first` on.
void move_to(TileStep& step, std::int64_t first) {
  const auto move = [&](float*& to, std::int64_t cols) {
    if (to != nullptr) to += first * cols;
  };
  if (step.kind == TileStep::Kind::rows) return move(step.plain.y, step.plain.rows);
  if (step.kind == TileStep::Kind::gate_up) {
    step.gate_up.act =
        static_cast<char*>(step.gate_up.act) + first * step.gate_up.rows * bytes_of(step.gate_up.act_type);
    return;
  }
  QkvStep<float>& s = step.qkv;
  const std::int64_t d = 2 * std::int64_t{s.half};
  for (float** to : {&s.q_out, &s.q_unrotated}) move(*to, s.query_heads * d);
  for (float** to : {&s.k_out, &s.k_unrotated, &s.v_out}) move(*to, s.kv_heads * d);
  s.tokens += first;
}

/// As many rows at a time as the kernels take.
void stream(const TileStep& whole, const StepInput& input, StreamHandle stream) {
  const std::int64_t most = tile_rows_at_once(input.cols, whole.format);
  for (std::int64_t first = 0; first < input.n; first += most) {
    TileStep step = whole;
    move_to(step, first);
    StepInput some = input;
    some.x += first * input.cols;
    some.n = std::min(most, input.n - first);
    stream_tiles(step, some, stream);
  }
}

}  // namespace

bool streams_tiles(const DeviceWeight& w) {
  return w.tiled() && tile_rows_at_once(w.cols, w.format) > 0;
}

void stream_product(const DeviceWeight& w, const Vector& bias, const StepInput& input, float* y, bool add,
                    StreamHandle handle) {
  TileStep step = step_of(TileStep::Kind::rows, w);
  step.matrices[0] = static_cast<const char*>(w.data);
  step.count = static_cast<int>((w.rows + 2 * kTileRows - 1) / (2 * kTileRows));
  step.plain = {w.rows, bias, y, add};
  stream(step, input, handle);
}

void stream_gate_up(const GateUpStep<float>& gate_up, const DeviceWeight& gate, const DeviceWeight& up,
                    const StepInput& input, StreamHandle handle) {
  TileStep step = step_of(TileStep::Kind::gate_up, gate);
  step.matrices[0] = static_cast<const char*>(gate.data);
  step.matrices[1] = static_cast<const char*>(up.data);
  step.count = static_cast<int>((gate.rows + kTileRows - 1) / kTileRows);
  step.gate_up = gate_up;
  stream(step, input, handle);
}

std::int64_t tile_expert_rows_at_once(const DeviceWeight& w) {
  const int rows = w.tiled() ? tile_rows_at_once(w.cols, w.format) : 0;
  return rows == 8 ? 8 : std::min(rows, 1);  // there are kernels of experts for these
}

void stream_expert_product(const DeviceWeight& w, int count, const Vector& bias, const StepInput& input,
                           float* y, const ExpertTiles& experts, StreamHandle handle) {
  const std::int64_t rows = w.rows / count;
  TileStep step = step_of(TileStep::Kind::rows, w);
  step.matrices[0] = static_cast<const char*>(w.data);
  step.count = static_cast<int>((rows + 2 * kTileRows - 1) / (2 * kTileRows));
  step.plain = {rows, bias, y, false};
  step.experts = experts;
  step.experts.stride = tiled_bytes(w.format, rows, w.cols);
  stream_tiles(step, input, handle);
}

void stream_expert_gate_up(const GateUpStep<float>& gate_up, const DeviceWeight& gate, const DeviceWeight& up,
                           int count, const StepInput& input, const ExpertTiles& experts,
                           StreamHandle handle) {
  TileStep step = step_of(TileStep::Kind::gate_up, gate);
  step.matrices[0] = static_cast<const char*>(gate.data);
  step.matrices[1] = static_cast<const char*>(up.data);
  step.count = static_cast<int>((gate.rows / count + kTileRows - 1) / kTileRows);
  step.gate_up = gate_up;
  step.experts = experts;
  step.experts.stride = tiled_bytes(gate.format, gate.rows / count, gate.cols);
  stream_tiles(step, input, handle);
}

bool streams_heads(const QkvStep<float>& step) {
  return step.half % kTileRows == 0 && step.half > kTileRows;
}

void stream_qkv(const QkvStep<float>& qkv, const DeviceWeight& q, const DeviceWeight& k,
                const DeviceWeight& v, const StepInput& input, StreamHandle handle) {
  const DeviceWeight* const weights[] = {&q, &k, &v};
  const int each = qkv.half / kTileRows, heads[] = {qkv.query_heads, qkv.kv_heads, qkv.kv_heads};
  int first = 0;
  for (int i = 0; i < 3;) {
    TileStep step = step_of(TileStep::Kind::qkv, *weights[i]);
    for (int m = 0; m < 3; ++m) step.matrices[m] = static_cast<const char*>(weights[m]->data);
    step.qkv = qkv;
    step.heads_factor = static_cast<unsigned>(((std::uint64_t{1} << 32) + static_cast<unsigned>(each) - 1) /
                                              static_cast<unsigned>(each));
    step.first = first;
    for (; i < 3 && weights[i]->format == step.format; ++i) step.count += heads[i] * each;
    stream(step, input, handle);
    first += step.count;
  }
}

}  // namespace lode::cuda
