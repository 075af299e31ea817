// SPDX-License-Identifier: Apache-2.0
// What is known of a GPU, or set on it, once for each GPU of the host: the runtime keeps attributes of kernels
// apart by device.
#pragma once

#include <array>
#include <mutex>

namespace lode::cuda {

inline constexpr int kMostDevices = 16;

/// The device that the calling thread works on. RunError for one past kMostDevices.
int current_device();

/// A value that is found once for each device, with what finding it sets there.
template <class T>
class PerDevice {
 public:
  template <class Find>
  const T& get(const Find& find) {
    const auto at = static_cast<std::size_t>(current_device());
    std::call_once(found_[at], [&] { values_[at] = find(); });
    return values_[at];
  }

 private:
  std::array<std::once_flag, kMostDevices> found_;
  std::array<T, kMostDevices> values_{};
};

}  // namespace lode::cuda
