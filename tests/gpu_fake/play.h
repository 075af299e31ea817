// SPDX-License-Identifier: Apache-2.0
// What the files of the played GPU share.
#pragma once

#include <functional>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "lodestone/types.h"

namespace lode::cuda {

/// Work to be done as late as the stream may do it.
void enqueue(StreamHandle stream, std::function<void()> work);
std::vector<float> widened(const void* from, DType type, std::int64_t n);

}  // namespace lode::cuda
