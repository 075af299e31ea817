// SPDX-License-Identifier: Apache-2.0
// NCCL's all-reduce over the GPUs of this process; the library is opened when it is first wanted.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

class Nccl {
 public:
  /// Null where there is no library or it cannot join these GPUs; `found` says which is in use or why none.
  static std::unique_ptr<Nccl> open(std::span<const int> devices, std::string& found);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  /// numbers[i] = the sum of all ranks' numbers[i]. Each rank calls it from its own thread.
  void sum(int rank, float* numbers, std::int64_t count, StreamHandle stream) const;
  /// Connects all GPUs for messages of these sizes: a captured call must not wait for another rank's.
  void warm_up(std::span<const std::int64_t> counts) const;

 private:
  Nccl();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::cuda
