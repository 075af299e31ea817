// SPDX-License-Identifier: Apache-2.0
// What sm_90 brings: clusters of blocks, and kernels that start while the one in front still runs. Some of
// those release the kernel behind them before their own wait, so several may be under way: before its wait a
// kernel may look up only what was written by a copy or by a kernel that was launched plainly, releases nothing
// early and ends with a fence, with no other writer since; and, past the first-level cache, what was written before the kernel in front, if all blocks of that
// one release behind their wait. The rest it reads after the wait.
#pragma once

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"

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

/// A launch in clusters of so many blocks, 1 for none, and early unless said otherwise.
class EarlyLaunch : public Launch {
 public:
  EarlyLaunch(dim3 grid, int threads, int shared, int cluster, StreamHandle stream, bool early = true)
      : Launch(LaunchShape{.grid = grid,
                           .block = static_cast<unsigned>(threads),
                           .shared_bytes = static_cast<std::size_t>(shared),
                           .cluster = has_clusters() ? cluster : 1,
                           .early = early && has_clusters()},
               stream) {}

  /// How many clusters run at once.
  template <class... Parameters>
  int clusters_at_once(void (*kernel)(Parameters...)) const {
    return cuda::clusters_at_once(reinterpret_cast<const void*>(kernel), shape_.cluster,
                                  static_cast<int>(shape_.block.x),
                                  static_cast<std::int64_t>(shape_.shared_bytes));
  }
};

}  // namespace lode::cuda
