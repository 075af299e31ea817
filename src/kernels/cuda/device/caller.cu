// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/out_of_memory.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device_count.h"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/cuda/device/per_device.h"

namespace lode::cuda {

namespace {

/// A driver that was used does not work in a fork. The fork notes that it is one: getpid is a system call, and every
/// call of a caller's would pay for it.
void check_process() {
  static std::atomic<bool> is_fork = false;
  static const int noted = pthread_atfork(nullptr, nullptr, [] { is_fork = true; });
  if (noted != 0)
    throw RunError("out of memory: expected room to note forks of the process; close other programs");
  if (is_fork)
    throw RunError(
        "expected GPUs to be used in the process that used them first, found a fork of it; start a new "
        "process "
        "in place of a fork");
}

/// Memory of the current device that is kept when it is given back.
cudaMemPool_t pool() {
  static PerDevice<cudaMemPool_t> pools;
  return pools.get([] {
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location = {cudaMemLocationTypeDevice, current_device()};
    cudaMemPool_t made = nullptr;
    LODE_CUDA(cudaMemPoolCreate(&made, &wanted));
    std::uint64_t keep = std::uint64_t{256} << 20;
    LODE_CUDA(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep));
    return made;
  });
}

}  // namespace

OnDevice::OnDevice(int device) {
  check_process();
  static std::atomic<int> known = 0;  // asking takes its time, and each call of a caller's asks several times
  int count = known;
  if (count == 0) known = count = device_count();
  if (device < 0 || device >= count)
    throw RunError("expected one of " + std::to_string(count) + " GPUs, found GPU " + std::to_string(device) +
                   " (counted from 0)");
  LODE_CUDA(cudaGetDevice(&before_));
  if (device != before_) LODE_CUDA(cudaSetDevice(device));
}
OnDevice::~OnDevice() {
  int now = 0;
  if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
}

StreamMemory::StreamMemory(std::int64_t bytes, const CallerStream& stream) : stream_(stream) {
  if (bytes == 0) return;
  const OnDevice here(stream.device);
  flush_launches();
  const cudaError_t status =
      cudaMallocFromPoolAsync(&data_, static_cast<std::size_t>(bytes), pool(), stream.stream);
  if (status == cudaSuccess) return;
  data_ = nullptr;
  if (status != cudaErrorMemoryAllocation) check(status, "cudaMallocFromPoolAsync");
  cudaGetLastError();
  throw OutOfDeviceMemory("out of GPU memory: expected " + std::to_string(bytes) + " bytes for a result");
}
StreamMemory::~StreamMemory() {
  if (data_ == nullptr) return;
  try {
    const OnDevice here(stream_.device);
    flush_launches_quietly();
    cudaFreeAsync(data_, stream_.stream);
    cudaGetLastError();
  } catch (const RunError&) {  // in a fork, or where the process ends: the driver has let it go
  }
}

namespace {

bool is_captured(StreamHandle stream) {
  cudaStreamCaptureStatus status{};
  LODE_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

std::uint64_t number_of(StreamHandle stream) {
  static std::mutex mutex;
  static auto* const known = new std::map<StreamHandle, std::uint64_t>;  // never destroyed
  const bool captured = is_captured(stream);
  const std::lock_guard guard(mutex);
  if (captured) {  // a stream that is captured may not be asked
    const auto at = known->find(stream);
    return at != known->end() ? at->second : 0;
  }
  unsigned long long number = 0;
  LODE_CUDA(cudaStreamGetId(stream, &number));
  return (*known)[stream] = number;
}

void check_not_captured(const CallerStream& stream) {
  if (is_captured(stream.stream))
    throw RunError(
        "expected this call to have run once in the stream before the stream is captured, found that it has "
        "not");
}

struct Workspace::Piece {
  int device = 0;
  std::uint64_t stream = 0;
  Buffer buffer;
  std::mutex mutex;
  bool in_graph = false;  ///< a graph may be replayed with this buffer as long as the process lives

  ~Piece() { let_go(); }
  /// What a graph has is never freed.
  void let_go() {
    if (std::exchange(in_graph, false)) static_cast<void>(new Buffer(std::move(buffer)));
  }
};

Workspace::Workspace(std::int64_t bytes, const CallerStream& stream) {
  constexpr std::size_t kMostHeld = 32;
  static std::mutex mutex;
  // Used last comes last. Never destroyed: the driver would be gone by then.
  static auto* const held = new std::vector<std::shared_ptr<Piece>>;
  const std::uint64_t number = number_of(stream.stream);
  {
    const std::lock_guard guard(mutex);
    const auto at = std::find_if(held->begin(), held->end(), [&](const auto& piece) {
      return piece->device == stream.device && piece->stream == number;
    });
    if (at != held->end()) {
      piece_ = *at;
      held->erase(at);
    } else {
      piece_ = std::make_shared<Piece>();
      piece_->device = stream.device, piece_->stream = number;
    }
    held->push_back(piece_);
    if (held->size() > kMostHeld) held->erase(held->begin());
  }
  lock_ = std::unique_lock(piece_->mutex);
  if (piece_->buffer.bytes() >= bytes) {
    piece_->in_graph |= is_captured(stream.stream);
    return;
  }
  check_not_captured(stream);
  piece_->let_go();
  piece_->buffer = Buffer(bytes, "the workspace of a stream");
  fill(piece_->buffer.as<void>(), 0, bytes, stream.stream);
}

Workspace::~Workspace() {
  flush_launches_quietly();  // while no other thread has it
}

void* Workspace::data() const {
  return piece_->buffer.as<void>();
}

namespace {

/// Page-locked memory that a copy has read, or reads until its event.
struct Staging {
  int device = 0;
  PinnedBuffer memory;
  cudaEvent_t read = nullptr;
};

}  // namespace

void upload(void* to, const void* from, std::int64_t bytes, const CallerStream& stream) {
  constexpr std::int64_t kLeast = 1 << 16;
  static std::mutex mutex;
  static auto* const pieces = new std::vector<Staging>;  // never destroyed, as above
  const std::lock_guard guard(mutex);
  auto at = std::find_if(pieces->begin(), pieces->end(), [&](const Staging& s) {
    return s.device == stream.device && s.memory.bytes() >= bytes && cudaEventQuery(s.read) == cudaSuccess;
  });
  cudaGetLastError();  // an event that has not passed
  if (at == pieces->end()) {
    Staging made;
    made.device = stream.device;
    made.memory = PinnedBuffer(
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(bytes, kLeast)))));
    LODE_CUDA(cudaEventCreateWithFlags(&made.read, cudaEventDisableTiming));
    at = pieces->insert(pieces->end(), std::move(made));
  }
  std::memcpy(at->memory.as<void>(), from, static_cast<std::size_t>(bytes));
  copy(to, at->memory.as<void>(), bytes, stream.stream);
  LODE_CUDA(cudaEventRecord(at->read, stream.stream));
}

void copy_and_wait(void* to, const void* from, std::int64_t bytes, const CallerStream& stream) {
  const OnDevice here(stream.device);
  copy(to, from, bytes, stream.stream);
  flush_launches();
  LODE_CUDA(cudaStreamSynchronize(stream.stream));
}

}  // namespace lode::cuda
