// SPDX-License-Identifier: Apache-2.0
// Links of a graph of keys made on the GPU (ann/graph/graph_device.h).
#pragma once

#include <memory>

#include "ann/graph/graph_device.h"

namespace lode {

/// Bytes of device memory that a linker holds; 0 where the kernels do not take such a graph.
std::int64_t device_linker_bytes(std::int64_t keys, std::int64_t width, std::int64_t queries,
                                 std::int64_t each, int degree);

/// On the calling thread's device, in a stream of its own; device_linker_bytes is not 0. Throws OutOfDeviceMemory, later
/// calls do not. Keeps `held`.
std::unique_ptr<GraphLinker> device_linker(Matrix<const float> keys, std::span<const Node> nearest,
                                           std::int64_t each, int degree,
                                           std::shared_ptr<void> held = nullptr);

}  // namespace lode
