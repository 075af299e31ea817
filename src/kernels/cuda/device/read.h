// SPDX-License-Identifier: Apache-2.0
// The floor under every kernel that must read its input once: a kernel that does nothing else.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Reads [from, from + bytes), 16 bytes a thread and load; `blocks` of 512 threads. `sink` takes 16 bytes
/// that are hardly ever written.
void read_only(const void* from, std::int64_t bytes, int blocks, void* sink, StreamHandle stream);

}  // namespace lode::cuda
