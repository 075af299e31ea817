// SPDX-License-Identifier: Apache-2.0
#include "gpu/layers/gpu_states.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

GpuStates::GpuStates(std::int64_t floats) : floats_(floats) {
  if (floats == 0) return;
  for (cuda::Buffer& buffer : buffers_)
    buffer = cuda::Buffer(floats * std::int64_t{sizeof(float)}, "states of recurrent layers");
}

void GpuStates::clear(std::int64_t tokens, cuda::StreamHandle stream) {
  if (empty()) return;
  cuda::fill(buffers_[0].as<void>(), 0, buffers_[0].bytes(), stream);
  tokens_[0] = tokens;
  tokens_[1] = kGone;
}

void GpuStates::load(const RecurrentStates& states, cuda::StreamHandle stream) {
  if (empty()) return;
  LODE_ASSERT(states.floats() == floats_);
  tokens_[0] = tokens_[1] = kGone;
  const std::span<const float> now = states.at(states.tokens());
  cuda::copy(buffers_[0].as<void>(), now.data(), buffers_[0].bytes(), stream);
  tokens_[0] = states.tokens();
}

void GpuStates::bring(std::int64_t tokens, int layers, RecurrentStates& states,
                      cuda::StreamHandle stream) const {
  if (empty() || states.tokens() >= tokens) return;
  const float* from = at(tokens);
  LODE_ASSERT(from != nullptr && states.floats() == floats_);
  for (int layer = 0; layer < layers; ++layer) {
    if (!states.has(layer)) continue;
    const std::span<float> to = states.after(layer);
    cuda::copy(to.data(), from, static_cast<std::int64_t>(to.size_bytes()), stream);
    from += to.size();
  }
  states.commit(tokens);
}

const float* GpuStates::at(std::int64_t tokens) const {
  for (int i = 0; i < 2; ++i)
    if (tokens_[i] == tokens) return buffers_[i].as<float>();
  return nullptr;
}

cuda::DeltaRows GpuStates::next(std::int64_t begin, std::int64_t tokens, std::int32_t first,
                                std::int32_t count, const float* from) {
  const float* const here = at(tokens);
  if (here == nullptr) tokens_[0] = tokens_[1] = kGone;  // those of another text's tokens
  const float* const before = here != nullptr ? here : from;
  LODE_ASSERT(before != nullptr);
  const bool written = tokens > begin;  // by this call
  const int to = (before == buffers_[0].as<float>()) == written ? 0 : 1;
  tokens_[to] = kGone;  // until the step has ended
  return {.before = before, .after = buffers_[to].as<float>(), .first = first, .count = count};
}

void GpuStates::commit(const cuda::DeltaRows& rows, std::int64_t tokens) {
  tokens_[rows.after == buffers_[0].as<float>() ? 0 : 1] = tokens;
}

std::int64_t GpuStates::reachable(std::int64_t tokens) const {
  if (empty()) return tokens;
  std::int64_t most = 0;
  for (const std::int64_t here : tokens_)
    if (here <= tokens) most = std::max(most, here);
  return most;
}

}  // namespace lode
