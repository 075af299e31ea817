// SPDX-License-Identifier: Apache-2.0
// What several GPUs of one host make, on each of them, of what each has computed: the sum, the merge of states of
// attention over disjoint keys, or all of it side by side.
//
// Each takes one kernel: a GPU tells the others that its part is there, waits for theirs, reads them over peer
// memory and adds or merges them in the order of the ranks. All GPUs get the same bits, whenever the others come.
// Sums of larger messages go to NCCL, which is opened at run time; where it is not found, the same kernel takes
// them, and where GPUs cannot read each other's memory, NCCL takes all sums, and there is no merge.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_count.h"
#include "lodestone/gpu_sum.h"

namespace lode::cuda {

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
  bool reads_peers() const;        ///< what a merge and a gathering need

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// One context's exchanges. Calls alternate between slot 0 and 1, the same on every rank, and so may be captured;
/// only where every rank has waited for its stream may two calls on either side have one slot.
class GroupExchange {
 public:
  /// For parts of at most so many numbers.
  GroupExchange(const DeviceGroup& group, std::int64_t most);
  ~GroupExchange();
  GroupExchange(const GroupExchange&) = delete;
  GroupExchange& operator=(const GroupExchange&) = delete;

  std::int64_t bytes() const;  ///< of memory on one GPU
  /// Where this rank's part is written before the call for that slot; on that rank's GPU.
  float* part(int rank, int slot) const;
  /// to = the sum of all ranks' parts (+ to), on this rank's stream and its GPU. Every rank must call it.
  void sum(int rank, int slot, std::int64_t count, float* to, bool add, StreamHandle stream) const;
  /// to[r, :] = the merge of all ranks' states of row r, whose part is their outputs [rows, d], then their
  /// log-sum-exps [rows]; -inf: no keys, and the outputs are not looked at. d is a multiple of 4.
  void merge(int rank, int slot, std::int64_t rows, int d, float* to, StreamHandle stream) const;
  /// to[r, :] = the `count` numbers of 4 bytes of rank r's part, [ranks, count].
  void gather(int rank, int slot, std::int64_t count, void* to, StreamHandle stream) const;
  /// A rank has failed: exchanges under way end at once, and no later one is made.
  void stop() noexcept;
  /// After a step: RunError where a rank waited for another in vain.
  void expect_whole() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::cuda
