// SPDX-License-Identifier: Apache-2.0
// What work on a caller's stream needs: its device, memory in the stream's order, and a workspace that stays.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// A stream that others made, and its device. It must live as long as memory that was made in its order.
struct CallerStream {
  int device = 0;
  StreamHandle stream = nullptr;  ///< null: the legacy default stream
};

/// Makes a device the thread's own, and gives back the one before. RunError where there is no such GPU, or a fork
/// of a process that used GPUs is to use one.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

/// Device memory that is there for work behind this in the stream, and goes behind what the stream was told until
/// it is destroyed: nobody waits. Pieces that were given back are kept for the next ones.
class StreamMemory {
 public:
  StreamMemory() = default;
  StreamMemory(std::int64_t bytes, const CallerStream& stream);
  ~StreamMemory();
  StreamMemory(StreamMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), stream_(other.stream_) {}
  StreamMemory& operator=(StreamMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  CallerStream stream_;
};

/// A number of the stream that no other stream of the process has or will have; 0 of one that is captured and whose
/// number nobody asked for before.
std::uint64_t number_of(StreamHandle stream);

/// The workspace of a stream for decode attention (decode_workspace_bytes), zeroed, as large as the largest that was
/// asked for; growing waits for the GPU. While this lives no other thread has it. The stream's device is current.
/// Of many streams those that were used least lately give theirs back.
class Workspace {
 public:
  Workspace(std::int64_t bytes, const CallerStream& stream);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const;

 private:
  struct Piece;
  std::shared_ptr<Piece> piece_;
  std::unique_lock<std::mutex> lock_;
};

/// RunError while the stream is captured into a graph, which would read memory that is not there any more.
void check_not_captured(const CallerStream& stream);

/// Enqueues a copy to the device of memory that may change once this returns. The stream's device is current.
void upload(void* to, const void* from, std::int64_t bytes, const CallerStream& stream);

/// Copies between host and device, in the stream's order, and waits for them.
void copy_and_wait(void* to, const void* from, std::int64_t bytes, const CallerStream& stream);

}  // namespace lode::cuda
