// SPDX-License-Identifier: Apache-2.0
// What sm_90 brings: clusters of blocks, and kernels that start while the one in front still runs. Some of
// those release the kernel behind them before their own wait, so several may be under way: before its wait a
// kernel may look up only what was written by a copy or by a kernel that was launched plainly and releases nothing
// early, with no other writer since; and, past the first-level cache, what was written before the kernel in front, if all blocks of that
// one release behind their wait. The rest it reads after the wait.
#pragma once

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device.h"

namespace lode::cuda {

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// From here on the kernel behind this one may start.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// 9 for sm_90: what the current device has and this program's code for it was compiled for, the lesser. (A
/// driver translates code for sm_80 for any later GPU; clusters and early launches are not in it.)
int capability_major();
inline bool has_clusters() {
  return capability_major() >= 9;
}

/// The attributes of a launch: in clusters of so many blocks, 1 for none, and early unless said otherwise.
class EarlyLaunch {
 public:
  EarlyLaunch(dim3 grid, int threads, int shared, int cluster, StreamHandle stream, bool early = true) {
    config_.gridDim = grid;
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config_.stream = stream;
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config_.attrs = attributes_;
    config_.numAttrs = !has_clusters() ? 0 : cluster > 1 ? 2 : 1;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;

  template <class... Args>
  void operator()(void (*kernel)(Args...), const Args&... args) const {
    LODE_CUDA(cudaLaunchKernelEx(&config_, kernel, args...));
  }
  /// How many clusters run at once.
  template <class... Args>
  int clusters_at_once(void (*kernel)(Args...)) const {
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config_) == cudaSuccess) return count;
    static_cast<void>(cudaGetLastError());
    return 0;
  }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace lode::cuda
