// SPDX-License-Identifier: Apache-2.0
// The states of one sequence's recurrent layers on the GPU, one layer's behind the other as RecurrentStates has them.
// There is room for two: a forward call reads one and writes the other, so that it can be given up.
#pragma once

#include "kernels/cuda/delta/delta.h"
#include "kv/recurrent.h"

namespace lode {

class GpuStates {
 public:
  /// Floats of all layers; 0: the model has no such layers, and nothing here does anything.
  explicit GpuStates(std::int64_t floats);
  static std::int64_t bytes(std::int64_t floats) { return 2 * floats * std::int64_t{sizeof(float)}; }
  bool empty() const { return floats_ == 0; }

  /// Those of a text's beginning, after `tokens`: zeros.
  void clear(std::int64_t tokens, cuda::StreamHandle stream);
  /// What the host has becomes what counts.
  void load(const RecurrentStates& states, cuda::StreamHandle stream);
  /// The host gets what is here after `tokens`, where it is behind. Waits for the stream.
  void bring(std::int64_t tokens, int layers, RecurrentStates& states, cuda::StreamHandle stream) const;

  /// After so many tokens; null: they are not here.
  const float* at(std::int64_t tokens) const;
  /// What the next tokens of a forward call read and write. The call began at `begin`, with the states that are here,
  /// or those `from` elsewhere; its later tokens are written where they are read.
  cuda::DeltaRows next(std::int64_t begin, std::int64_t tokens, std::int32_t first, std::int32_t count,
                       const float* from = nullptr);
  /// What was written counts, after so many tokens.
  void commit(const cuda::DeltaRows& rows, std::int64_t tokens);
  /// The most tokens up to `tokens` whose states are here, or 0.
  std::int64_t reachable(std::int64_t tokens) const;

 private:
  static constexpr std::int64_t kGone = -1;
  std::int64_t floats_ = 0;
  cuda::Buffer buffers_[2];  // [floats]
  std::int64_t tokens_[2] = {kGone, kGone};
};

}  // namespace lode
