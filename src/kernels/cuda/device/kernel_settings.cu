// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <map>
#include <mutex>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/per_device.h"

namespace lode::cuda {

namespace {

struct Settings {
  int shared_bytes = 0, percent = -1;
  bool wide_clusters = false;
};

/// Calls body(settings) of a kernel on the current device; one caller at a time, so that they are what the runtime has.
template <class Body>
void with_settings(const void* kernel, const Body& body) {
  static std::mutex mutex;
  static std::array<std::map<const void*, Settings>, kMostDevices> all;
  const auto device = static_cast<std::size_t>(current_device());
  const std::lock_guard lock(mutex);
  body(all[device][kernel]);
}

}  // namespace

void allow_shared_bytes(const void* kernel, std::int64_t bytes) {
  with_settings(kernel, [=](Settings& s) {
    if (bytes <= s.shared_bytes) return;
    LODE_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    s.shared_bytes = static_cast<int>(bytes);
  });
}

void allow_wide_clusters(const void* kernel) {
  with_settings(kernel, [=](Settings& s) {
    if (s.wide_clusters) return;
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    s.wide_clusters = true;
  });
}

void prefer_shared_percent(const void* kernel, int percent) {
  with_settings(kernel, [=](Settings& s) {
    if (percent == s.percent) return;
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
    s.percent = percent;
  });
}

}  // namespace lode::cuda
