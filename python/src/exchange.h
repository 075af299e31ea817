// SPDX-License-Identifier: Apache-2.0
// DLPack's exchange API: what the type of an array offers so that C code sees the array's memory without a capsule and
// without a line of Python (PyTorch from 2.10 on).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "arrays.h"

namespace lode::python {

inline constexpr int kMostDimensions = 32;

/// An array's memory as its type tells it. Nothing has waited for what fills it.
struct Exchanged {
  nb::dlpack::dltensor tensor;
  std::uintptr_t stream = 0;  ///< on a GPU: in which the array's library enqueues its work now
};

/// Nothing for types without the API, and for arrays that say by themselves why nobody may have them, such as tensors with
/// gradients. `written`: only of libraries whose arrays may all be written to.
std::optional<Exchanged> exchanged(nb::handle array, bool written = false);

/// A view that keeps the array alive.
template <class A>
A view_of(const Exchanged& seen, nb::handle array) {
  const nb::dlpack::dltensor& t = seen.tensor;
  std::size_t shape[kMostDimensions];
  std::copy_n(t.shape, t.ndim, shape);
  return A(static_cast<char*>(t.data) + t.byte_offset, static_cast<std::size_t>(t.ndim), shape, array,
           t.strides, t.dtype, t.device.device_type, t.device.device_id);
}

}  // namespace lode::python
