// SPDX-License-Identifier: Apache-2.0
// Exchanges of GPUs that the host plays: each is a thread, which waits for the others' parts as a kernel would.
#include "kernels/cuda/reduce/group_exchange.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>

#include "gpu_fake/play.h"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {
constexpr int kDevices = 8, kAnySlot = -1;
}

int device_count() {
  return kDevices;
}
void use_device(int) {}

struct DeviceGroup::Impl {
  std::vector<int> devices;
  std::string way = "the host's threads";
};
DeviceGroup::DeviceGroup(std::vector<int> devices, GpuSum) : impl_(new Impl{.devices = std::move(devices)}) {
  for (const int device : impl_->devices)
    if (device < 0 || device >= kDevices) throw InputError("expected fewer GPUs, found 8");
}
DeviceGroup::~DeviceGroup() = default;
int DeviceGroup::size() const {
  return static_cast<int>(impl_->devices.size());
}
std::span<const int> DeviceGroup::devices() const {
  return impl_->devices;
}
const std::string& DeviceGroup::way() const {
  return impl_->way;
}
bool DeviceGroup::reads_peers() const {
  return true;
}

/// `calls` are counted on each rank when its stream comes to them, so a part that is overwritten too early, or a call
/// that a rank leaves out, shows.
struct GroupExchange::Impl {
  std::int64_t slot = 0;
  std::vector<Buffer> parts;             // [ranks] of [2, slot]
  std::vector<std::int64_t> arrived;     // [ranks] calls
  std::vector<std::int64_t> slots_seen;  // [ranks] the slot of the last call
  std::mutex mutex;
  std::condition_variable changed;
  bool stopped = false;

  float* part(int rank, int which) const {
    return parts[static_cast<std::size_t>(rank)].as<float>() + which * slot;
  }
  void wait_for_all(int rank, int which) {
    std::unique_lock lock(mutex);
    const auto r = static_cast<std::size_t>(rank);
    if (which != kAnySlot && slots_seen[r] == which) throw RunError("two calls in a row for one slot");
    slots_seen[r] = which;
    const std::int64_t call = ++arrived[r];
    changed.notify_all();
    const auto all = [&] {
      return stopped ||
             std::all_of(arrived.begin(), arrived.end(), [&](std::int64_t a) { return a >= call; });
    };
    if (!changed.wait_for(lock, std::chrono::seconds(60), all)) stopped = true;
  }
};

GroupExchange::GroupExchange(const DeviceGroup& group, std::int64_t most) : impl_(new Impl) {
  impl_->slot = most;
  const auto ranks = static_cast<std::size_t>(group.size());
  for (std::size_t rank = 0; rank < ranks; ++rank)
    impl_->parts.emplace_back(2 * most * std::int64_t{sizeof(float)}, "parts");
  impl_->arrived.resize(ranks);
  impl_->slots_seen.assign(ranks, -1);
}
GroupExchange::~GroupExchange() = default;
std::int64_t GroupExchange::bytes() const {
  return impl_->parts.front().bytes();
}
float* GroupExchange::part(int rank, int slot) const {
  return impl_->part(rank, slot);
}
void GroupExchange::sum(int rank, int slot, std::int64_t count, float* to, bool add,
                        StreamHandle stream) const {
  if (count > impl_->slot) throw RunError("a sum of more numbers than there is room for");
  enqueue(stream, [m = impl_.get(), rank, slot, count, to, add] {
    m->wait_for_all(rank, slot);
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = m->part(0, slot)[i];
      for (int r = 1; r < static_cast<int>(m->parts.size()); ++r) sum += m->part(r, slot)[i];
      to[i] = add ? to[i] + sum : sum;
    }
  });
}
void GroupExchange::merge(int rank, int slot, std::int64_t rows, int d, float* to,
                          StreamHandle stream) const {
  if (rows * (d + 1) > impl_->slot) throw RunError("a merge of more rows than there is room for");
  enqueue(stream, [m = impl_.get(), rank, slot, rows, d, to] {
    m->wait_for_all(rank, kAnySlot);
    const int ranks = static_cast<int>(m->parts.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto lse = [&](int r) { return m->part(r, slot)[rows * d + row]; };
      float peak = -INFINITY, sum = 0.0f;
      for (int r = 0; r < ranks; ++r) peak = std::max(peak, lse(r));
      for (int r = 0; r < ranks; ++r) sum += std::exp(lse(r) - peak);
      for (std::int64_t i = row * d; i < (row + 1) * d; ++i) {
        to[i] = 0.0f;
        for (int r = 0; r < ranks; ++r)
          if (lse(r) != -INFINITY) to[i] += std::exp(lse(r) - peak) / sum * m->part(r, slot)[i];
      }
    }
  });
}
void GroupExchange::gather(int rank, int slot, std::int64_t count, void* to, StreamHandle stream) const {
  if (count > impl_->slot) throw RunError("a gathering of more numbers than there is room for");
  enqueue(stream, [m = impl_.get(), rank, slot, count, to] {
    m->wait_for_all(rank, kAnySlot);
    for (std::size_t r = 0; r < m->parts.size(); ++r)
      std::copy_n(m->part(static_cast<int>(r), slot), count,
                  static_cast<float*>(to) + r * static_cast<std::size_t>(count));
  });
}
void GroupExchange::stop() noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->stopped = true;
  impl_->changed.notify_all();
}
void GroupExchange::expect_whole() const {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stopped) throw RunError("a GPU that shares the model failed");
}

}  // namespace lode::cuda
