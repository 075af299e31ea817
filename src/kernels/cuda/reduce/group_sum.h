// SPDX-License-Identifier: Apache-2.0
// The sum of what several GPUs of one host have computed, on each of them.
//
// Small messages take one kernel: each GPU tells the others that its part is there, waits for theirs, reads
// them over peer memory and adds them in the order of the ranks. All GPUs get the same bits, whenever the
// others come. Larger messages go to NCCL, which is opened at run time; where it is not found, the same kernel
// takes them, and where GPUs cannot read each other's memory, NCCL takes all.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "lodestone/gpu_sum.h"

namespace lode::cuda {

/// GPUs that this program sees.
int device_count();
/// From here on the calling thread works on this GPU.
void use_device(int device);

/// GPUs that sum together: peer access, NCCL's communicators. InputError when they are not all alike, RunError
/// when there is no way to sum. A device may be named twice, for tests on one GPU: then without NCCL.
class DeviceGroup {
 public:
  DeviceGroup(std::vector<int> devices, GpuSum by);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;
  int size() const;
  std::span<const int> devices() const;
  const std::string& way() const;  ///< how they sum, as a clause

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// One context's sums. Calls alternate between slot 0 and 1, the same on every rank, and so may be captured.
class GroupSum {
 public:
  /// For sums of at most so many numbers.
  GroupSum(const DeviceGroup& group, std::int64_t most);
  ~GroupSum();
  GroupSum(const GroupSum&) = delete;
  GroupSum& operator=(const GroupSum&) = delete;

  std::int64_t bytes() const;  ///< of memory on one GPU
  /// Where this rank's part is written before the call for that slot; on that rank's GPU.
  float* part(int rank, int slot) const;
  /// to = the sum of all ranks' parts (+ to), on this rank's stream and its GPU. Every rank must call it.
  void sum(int rank, int slot, std::int64_t count, float* to, bool add, StreamHandle stream) const;
  /// A rank has failed: sums under way end at once, and no later one is made.
  void stop() noexcept;
  /// After a step: RunError where a rank waited for another in vain.
  void expect_whole() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::cuda
