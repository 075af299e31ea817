// SPDX-License-Identifier: Apache-2.0
// What the engine asks of the states of recurrent layers that lie on the GPU: the host keeps some of them, since a GPU
// has those alone that a sequence goes on from.
#pragma once

#include "gpu/batch_backend.h"

namespace lode {

/// The states after context.tokens() come to the host, where it has earlier ones.
void bring_states(GpuContext& context, RecurrentStates& states);
/// The states after all tokens can be gone back to from now on; `gpu`: null where the host computes.
inline void keep_states(GpuContext* gpu, RecurrentStates& states) {
  if (gpu != nullptr) bring_states(*gpu, states);
  states.keep();
}
/// Of a context that has been cut back: the host's states, which are those of context.tokens(), count there.
void restore_states(GpuContext& context, const RecurrentStates& states);
/// The most own tokens up to `tokens` that a sequence can go on behind: all, but for recurrent layers.
std::int64_t reachable_behind(const GpuTail& tail, std::int64_t tokens);

}  // namespace lode
