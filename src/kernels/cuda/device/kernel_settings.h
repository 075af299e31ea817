// SPDX-License-Identifier: Apache-2.0
// What a launch asks of its kernel beside the launch itself. The runtime takes about a microsecond to set or to find such a
// thing, so what is known already is not asked for again.
#pragma once

#include <cstdint>

namespace lode::cuda {

/// Lets a kernel have so many bytes of dynamic shared memory on the current device, or more.
void allow_shared_bytes(const void* kernel, std::int64_t bytes);
/// Lets its clusters have more blocks than every GPU promises.
void allow_wide_clusters(const void* kernel);
/// How much of a processor's memory blocks should have, in per cent: the rest is cache.
void prefer_shared_percent(const void* kernel, int percent);
/// How many clusters of so many blocks run at once on the current device, each block with so many threads and bytes of
/// dynamic shared memory; 0 where none can.
int clusters_at_once(const void* kernel, int blocks, int threads, std::int64_t shared_bytes);

}  // namespace lode::cuda
