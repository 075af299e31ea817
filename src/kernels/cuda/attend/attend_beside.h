// SPDX-License-Identifier: Apache-2.0
// Decode attention in a stream beside the one that a step runs in.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// As attend_full_decode and with its bits. No block waits for one that may not have started, so the stream
/// takes no place of may_wait_for_room from others; for short lists, which few blocks share. Kernels of two
/// streams need a workspace each.
void attend_full_beside(const Queries& queries, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream);

}  // namespace lode::cuda
