// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Multiprocessors of the current device.
int processors();

/// Whether blocks of this stream's kernels may wait for others of their launch that have not started yet: of
/// two streams at a time, which leave each other room; a third's might with them fill the GPU with blocks
/// that wait. What is said of a stream holds until it is destroyed.
bool may_wait_for_room(StreamHandle stream);

}  // namespace lode::cuda
