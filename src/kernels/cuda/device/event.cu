// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/launch_chain.h"

namespace lode::cuda {

Event::Event() {
  const BesideNoCapture turn;
  LODE_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}
Event::~Event() {
  const BesideNoCapture turn;
  cudaEventDestroy(event_);
}
void Event::record(StreamHandle stream) {
  flush_launches();
  LODE_CUDA(cudaEventRecord(event_, stream));
}
void Event::wait() const {
  flush_launches();
  LODE_CUDA(cudaEventSynchronize(event_));
}
void Event::hold_up(StreamHandle stream) const {
  flush_launches();
  LODE_CUDA(cudaStreamWaitEvent(stream, event_, 0));
}

}  // namespace lode::cuda
