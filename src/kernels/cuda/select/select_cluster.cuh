// SPDX-License-Identifier: Apache-2.0
// Blocks that share a list: a cluster of eight that read each other's shared memory (sm_90 and later), or a
// block on its own.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/kernel_settings.h"

namespace lode::cuda {

constexpr int kCluster = 8, kSelectThreads = 1024;
constexpr int kWideCluster = 16, kWideThreads = 512;  // for lists so short that their keys fit in registers

template <int Cluster>
struct Together {
  static __device__ __forceinline__ int rank() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) return static_cast<int>(cooperative_groups::this_cluster().block_rank());
#endif
    return 0;
  }
  static __device__ __forceinline__ void sync() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) {
      cooperative_groups::this_cluster().sync();
      return;
    }
#endif
    __syncthreads();
  }
  /// The same variable of another block of the cluster.
  template <class T>
  static __device__ __forceinline__ T* of(T* mine, int other) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) return cooperative_groups::this_cluster().map_shared_rank(mine, other);
#endif
    return mine;
  }
};

/// Shared memory that a block of the kernel may have, less what its static variables take.
template <class Kernel>
int shared_bytes_per_block(Kernel kernel) {
  int device = 0, most = 0;
  cudaFuncAttributes of_kernel{};
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  LODE_CUDA(cudaFuncGetAttributes(&of_kernel, kernel));
  return most - static_cast<int>(of_kernel.sharedSizeBytes);
}

/// One cluster, or one block, for each of `lists`.
template <int Cluster, int Threads, class... Args>
void launch_together(void (*kernel)(Args...), std::int64_t lists, int shared, StreamHandle stream,
                     const Args&... args) {
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared);
  const EarlyLaunch launch({static_cast<unsigned>(lists * Cluster), 1, 1}, Threads, shared, Cluster, stream);
  launch(kernel, args...);
}

}  // namespace lode::cuda
