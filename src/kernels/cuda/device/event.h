// SPDX-License-Identifier: Apache-2.0
// A moment in a stream, for the host to wait for while the stream goes on.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// What the stream was told until now is what wait() waits for; of several calls the last counts.
  void record(StreamHandle stream);
  void wait() const;  ///< returns at once when nothing was recorded
  /// Makes a stream wait, and not the host.
  void hold_up(StreamHandle stream) const;

 private:
  CUevent_st* event_ = nullptr;
};

}  // namespace lode::cuda
