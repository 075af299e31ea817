// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

/// A barrier in shared memory. Its arrivals release what the thread wrote there and its waits acquire it, at
/// less cost than a fence, which would wait for every copy under way.
class SharedBarrier {
 public:
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address())
                 : "memory");
  }
  /// Returns how many were missing in this phase, this one with them.
  __device__ unsigned arrive_and_count() {
    unsigned missing;
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%1];\n"
        "mbarrier.pending_count.b64 %0, state;\n}"
        : "=r"(missing)
        : "r"(address())
        : "memory");
    return missing;
  }
  /// Waits for the end of the phase of this parity: 0 for the first.
  __device__ void wait(int parity) {
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address()), "r"(parity)
          : "memory");
    }
  }

 private:
  __device__ unsigned address() const { return shared_address(&bits_); }
  unsigned long long bits_;
};

}  // namespace lode::cuda
