// SPDX-License-Identifier: Apache-2.0
// What a launch asks of its kernel beside the launch itself. The runtime takes about a microsecond to set such a thing, so
// what is set already is not set again.
#pragma once

#include <cstdint>

namespace lode::cuda {

/// Lets a kernel have so many bytes of dynamic shared memory on the current device, or more.
void allow_shared_bytes(const void* kernel, std::int64_t bytes);
/// Lets its clusters have more blocks than every GPU promises.
void allow_wide_clusters(const void* kernel);
/// How much of a processor's memory blocks should have, in per cent: the rest is cache.
void prefer_shared_percent(const void* kernel, int percent);

}  // namespace lode::cuda
