// SPDX-License-Identifier: Apache-2.0
// Walks over a graph for many queries on the GPU (ann/graph/query_walks.h).
#pragma once

#include <memory>

#include "ann/graph/query_walks.h"

namespace lode {

/// Bytes of device memory that walks hold; 0 where the kernels do not take such a graph or queries.
std::int64_t device_walks_bytes(const Wanted& of, const BeamKeys& keys, const KeyGraph& like);

/// On the calling thread's device, in a stream of its own; device_walks_bytes is not 0. Throws OutOfDeviceMemory, later
/// calls do not. Keeps `held`.
std::unique_ptr<QueryWalks> device_walks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like,
                                         std::shared_ptr<void> held = nullptr);

}  // namespace lode
