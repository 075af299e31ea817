// SPDX-License-Identifier: Apache-2.0
// Every kernel of the library is launched here, so that a chain (launch_chain.h) can hold it back.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <span>
#include <type_traits>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

struct LaunchShape {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  int cluster = 1;     ///< blocks of a cluster; 1: there are none
  bool early = false;  ///< may begin while the kernel in front of it still runs (hopper.cuh)
};

constexpr std::size_t kMostArguments = 32;
struct KernelArgument {
  const void* at = nullptr;
  std::size_t bytes = 0;
};

void launch(const LaunchShape& shape, const void* kernel, std::span<const KernelArgument> arguments,
            StreamHandle stream);

class Launch {
 public:
  Launch(dim3 grid, dim3 block, std::size_t shared_bytes, StreamHandle stream)
      : Launch(LaunchShape{grid, block, shared_bytes}, stream) {}

  template <class... Parameters>
  void operator()(void (*kernel)(Parameters...), const std::type_identity_t<Parameters>&... arguments) const {
    static_assert(sizeof...(Parameters) <= kMostArguments);
    static_assert((std::is_trivially_copyable_v<Parameters> && ...));
    const std::array<KernelArgument, sizeof...(Parameters)> all = {
        KernelArgument{&arguments, sizeof(Parameters)}...};
    launch(shape_, reinterpret_cast<const void*>(kernel), all, stream_);
  }

 protected:
  Launch(const LaunchShape& shape, StreamHandle stream) : shape_(shape), stream_(stream) {}

  LaunchShape shape_;
  StreamHandle stream_ = nullptr;
};

}  // namespace lode::cuda
