// SPDX-License-Identifier: Apache-2.0
// Every CUDA call is checked.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "lodestone/error.h"

namespace lode::cuda {

/// RunError with the call and what the runtime says of it.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a failed call is not the next one's fault
  throw RunError(std::string("the GPU failed: ") + cudaGetErrorString(status) + " (" + call + ")");
}

}  // namespace lode::cuda

#define LODE_CUDA(call) ::lode::cuda::check((call), #call)
