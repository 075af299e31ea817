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
  std::map<std::array<std::int64_t, 3>, int> clusters;  ///< at once, by blocks, threads and shared bytes
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

int clusters_at_once(const void* kernel, int blocks, int threads, std::int64_t shared_bytes) {
  int count = 0;
  with_settings(kernel, [&](Settings& s) {
    const auto [known, is_new] = s.clusters.try_emplace({blocks, threads, shared_bytes});
    if (is_new) {
      cudaLaunchAttribute attribute = {};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(static_cast<unsigned>(blocks));
      config.blockDim = dim3(static_cast<unsigned>(threads));
      config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
      config.attrs = &attribute;
      config.numAttrs = 1;
      if (cudaOccupancyMaxActiveClusters(&known->second, kernel, &config) != cudaSuccess) known->second = 0;
      static_cast<void>(cudaGetLastError());
    }
    count = known->second;
  });
  return count;
}

}  // namespace lode::cuda
