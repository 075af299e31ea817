// SPDX-License-Identifier: Apache-2.0
// The GPU as the rest of the engine sees it: streams, memory and graphs, owned and freed. No CUDA header is
// included here, so that any C++ file may use it; every function throws RunError with what the driver said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace lode::cuda {

using StreamHandle = CUstream_st*;

/// What stands between this program and a GPU; `ok` means nothing does.
struct Availability {
  bool ok = false;
  std::string why;   ///< one clause: "built without CUDA", "no NVIDIA driver", "driver 12.2 is older than
                     ///< CUDA 13.0", ...
  std::string name;  ///< of device 0
  std::int64_t total_bytes = 0, free_bytes = 0;
  int multiprocessors = 0, major = 0, minor = 0;
};
/// Without `memory` nothing is said of bytes, and the driver need not be started whole, which takes its time.
Availability availability(bool memory = true);

/// Held by what creates or destroys things of the driver (memory, streams, handles of libraries) or may load
/// kernels: while one thread captures a graph, others that do so make its capture fail now and then, whatever
/// the mode of the capture. Such threads wait for its end, and it for them; within a capture of the thread's
/// own this holds nothing.
class BesideNoCapture {
 public:
  BesideNoCapture();
  ~BesideNoCapture();
  BesideNoCapture(const BesideNoCapture&) = delete;
  BesideNoCapture& operator=(const BesideNoCapture&) = delete;

 private:
  bool held_ = false;
};

/// A stream of its own, not synchronised with the default one.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  StreamHandle get() const { return stream_; }
  void synchronize() const;

 private:
  StreamHandle stream_ = nullptr;
};

/// Memory with one owner, given back by Free, which takes null.
template <void (*Free)(void*) noexcept>
class Owned {
 public:
  Owned() = default;
  ~Owned() { Free(data_); }
  Owned(Owned&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }

 protected:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};
void free_device(void* data) noexcept;
void free_pinned(void* data) noexcept;

/// Device memory. RunError when there is not enough: says how many bytes for what, and how many are free.
class Buffer : public Owned<free_device> {
 public:
  Buffer() = default;
  Buffer(std::int64_t bytes, std::string_view what);
};

/// Page-locked host memory, for copies that run beside the host.
class PinnedBuffer : public Owned<free_pinned> {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(std::int64_t bytes);
};

/// Enqueues a copy; host memory should be pinned.
void copy(void* to, const void* from, std::int64_t bytes, StreamHandle stream);
void fill(void* at, int byte, std::int64_t bytes, StreamHandle stream);
/// The same of few numbers of 4 bytes in pinned memory: by a kernel where one can be held back (launch_chain.h).
void copy_numbers(void* to, const PinnedBuffer& from, std::int64_t bytes, StreamHandle stream);

/// What a stream was told between begin and end, to be run again at the cost of one launch.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  /// Waits for every BesideNoCapture (of which this thread holds none); the same thread ends or abandons.
  static void begin(StreamHandle stream);
  static Graph end(StreamHandle stream);
  static void abandon(StreamHandle stream) noexcept;  ///< after an exception between begin and end
  void launch(StreamHandle stream) const;
  explicit operator bool() const { return exec_ != nullptr; }

 private:
  CUgraphExec_st* exec_ = nullptr;
};

/// Time on the device.
class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(StreamHandle stream);
  void stop(StreamHandle stream);
  double microseconds();  ///< waits for stop

 private:
  CUevent_st *start_ = nullptr, *stop_ = nullptr;
};

}  // namespace lode::cuda
