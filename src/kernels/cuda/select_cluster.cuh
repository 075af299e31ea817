// SPDX-License-Identifier: Apache-2.0
// Blocks that share a list: a cluster of eight that read each other's shared memory (sm_90 and later), or a
// block on its own.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/check.cuh"

namespace lode::cuda {

constexpr int kCluster = 8, kSelectThreads = 1024;

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
  static __device__ __forceinline__ const T* of(T* mine, int other) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster > 1) return cooperative_groups::this_cluster().map_shared_rank(mine, other);
#endif
    return mine;
  }
};

inline bool has_clusters() {
  static const bool has = [] {
    int device = 0, major = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return has;
}

/// Shared memory that a block may have, less what its static variables take.
inline int shared_bytes_per_block() {
  static const int bytes = [] {
    int device = 0, most = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return most - 2048;
  }();
  return bytes;
}

/// One cluster, or one block, for each of `lists`.
template <int Cluster, class... Args>
void launch_together(void (*kernel)(Args...), std::int64_t lists, int shared, StreamHandle stream,
                     const Args&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory of a selection");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(lists * Cluster));
  config.blockDim = dim3(kSelectThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {Cluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = Cluster > 1 ? 1 : 0;
  LODE_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace lode::cuda
