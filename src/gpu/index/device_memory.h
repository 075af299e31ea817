// SPDX-License-Identifier: Apache-2.0
// Copies to and from a GPU's memory while an index is built, and how wide keys may be on every GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/device/device.h"

namespace lode {

/// Wider heads need more shared memory than GPUs of compute 8.6, 8.9 and 12.0 have.
inline constexpr int kWidestEverywhere = 128;

/// Waits for the stream.
template <class T>
std::vector<T> downloaded(const T* from, std::int64_t count, const cuda::Stream& stream) {
  std::vector<T> to(static_cast<std::size_t>(count));
  cuda::copy(to.data(), from, count * std::int64_t{sizeof(T)}, stream.get());
  stream.synchronize();
  return to;
}

/// Of pageable memory, which the bytes have left when the call returns.
template <class T>
void upload(void* to, std::span<const T> from, const cuda::Stream& stream) {
  cuda::copy(to, from.data(), std::ssize(from) * std::int64_t{sizeof(T)}, stream.get());
}

}  // namespace lode
