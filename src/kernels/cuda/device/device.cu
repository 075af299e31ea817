// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "base/out_of_memory.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/cuda/device/pages.h"
#include "kernels/cuda/device/per_device.h"

namespace lode::cuda {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string megabytes(std::int64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

__global__ void probe_kernel() {}

constexpr int kCopyThreads = 256;
__global__ void copy_kernel(std::uint32_t* to, const std::uint32_t* from, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kCopyThreads) to[i] = from[i];
  __threadfence();  // for kernels that look it up before their wait (hopper.cuh)
}

/// Held whole by the thread that captures, shared by BesideNoCapture.
std::shared_mutex& captures() {
  static std::shared_mutex mutex;
  return mutex;
}
thread_local bool captures_here = false;
thread_local int turns_here = 0;  // of BesideNoCapture, one within another

/// Ends this thread's turn when it goes out of scope.
struct CaptureEnds {
  ~CaptureEnds() {
    captures_here = false;
    captures().unlock();
  }
};

}  // namespace

int current_device() {
  int device = 0;
  LODE_CUDA(cudaGetDevice(&device));
  if (device < kMostDevices) return device;
  throw RunError("expected at most " + std::to_string(kMostDevices) + " GPUs, found a use of GPU " +
                 std::to_string(device) + " (counted from 0)");
}

int capability_major() {
  static const int major = [] {
    int device = 0, found = 0;
    cudaFuncAttributes code{};
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&found, cudaDevAttrComputeCapabilityMajor, device));
    LODE_CUDA(cudaFuncGetAttributes(&code, probe_kernel));
    return std::min(found, code.ptxVersion / 10);
  }();
  return major;
}

int processors() {
  static const int count = [] {
    int device = 0, all = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device));
    return all;
  }();
  return count;
}

namespace {

constexpr std::ptrdiff_t kMostWaiting = 2;  // of a device
std::mutex waiting_mutex;
struct WaitingStream {
  StreamHandle stream = nullptr;
  int device = 0;
};
std::vector<WaitingStream>& waiting() {
  static std::vector<WaitingStream> streams;
  return streams;
}
void leave_room(StreamHandle stream) {
  const std::lock_guard lock(waiting_mutex);
  std::erase_if(waiting(), [=](const WaitingStream& w) { return w.stream == stream; });
}

}  // namespace

bool may_wait_for_room(StreamHandle stream) {
  const std::lock_guard lock(waiting_mutex);
  std::vector<WaitingStream>& streams = waiting();
  const auto is_it = [=](const WaitingStream& w) { return w.stream == stream; };
  if (std::any_of(streams.begin(), streams.end(), is_it)) return true;
  const int device = current_device();
  const auto here = [=](const WaitingStream& w) { return w.device == device; };
  if (std::count_if(streams.begin(), streams.end(), here) == kMostWaiting) return false;
  streams.push_back({stream, device});
  return true;
}

Availability availability(bool memory) {
  Availability found;
  int driver = 0, devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    found.why = "no NVIDIA driver";
    return found;
  }
  if (driver / 1000 < CUDART_VERSION / 1000) {
    found.why = "the NVIDIA driver is for CUDA " + version_text(driver) + ", and this program needs " +
                version_text(CUDART_VERSION) + ": install a newer driver";
    return found;
  }
  if (const cudaError_t status = cudaGetDeviceCount(&devices); status != cudaSuccess || devices == 0) {
    cudaGetLastError();
    found.why = status == cudaSuccess ? "no GPU" : cudaGetErrorString(status);
    return found;
  }
  cudaDeviceProp properties{};
  LODE_CUDA(cudaGetDeviceProperties(&properties, current_device()));
  found.name = properties.name;
  found.multiprocessors = properties.multiProcessorCount;
  found.major = properties.major;
  found.minor = properties.minor;
  if (found.major < 8) {
    found.why = "the GPU " + found.name + " has compute capability " + std::to_string(found.major) + "." +
                std::to_string(found.minor) + ", and this program needs 8.0";
    return found;
  }
  if (memory) {
    const DeviceMemory all = device_memory();
    found.free_bytes = all.free;
    found.total_bytes = all.total;
  }
  found.ok = true;
  return found;
}

BesideNoCapture::BesideNoCapture() {
  if (captures_here) return;
  if (turns_here++ == 0) captures().lock_shared();
  held_ = true;
}
BesideNoCapture::~BesideNoCapture() {
  if (held_ && --turns_here == 0) captures().unlock_shared();
}

Stream::Stream() {
  const BesideNoCapture turn;
  LODE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}
Stream::~Stream() {
  flush_launches_quietly();
  const BesideNoCapture turn;
  cudaStreamSynchronize(stream_);
  leave_room(stream_);
  cudaStreamDestroy(stream_);
}
void Stream::synchronize() const {
  flush_launches();
  LODE_CUDA(cudaStreamSynchronize(stream_));
}

void free_device(void* data) noexcept {
  if (data == nullptr) return;
  flush_launches_quietly();  // what is held back may use it
  const BesideNoCapture turn;
  cudaFree(data);
}
void free_pinned(void* data) noexcept {
  if (data == nullptr) return;
  flush_launches_quietly();  // what is held back may use it
  const BesideNoCapture turn;
  cudaFreeHost(data);
}

Buffer::Buffer(std::int64_t bytes, std::string_view what) {
  bytes_ = bytes;
  if (bytes == 0) return;
  const BesideNoCapture turn;
  if (const cudaError_t status = cudaMalloc(&data_, static_cast<std::size_t>(bytes)); status != cudaSuccess) {
    cudaGetLastError();
    data_ = nullptr;
    if (status != cudaErrorMemoryAllocation) check(status, "cudaMalloc");
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw OutOfDeviceMemory("out of GPU memory: expected " + megabytes(bytes) + " for " + std::string(what) +
                            ", found " + megabytes(static_cast<std::int64_t>(free)) + " free of " +
                            megabytes(static_cast<std::int64_t>(total)));
  }
}
PinnedBuffer::PinnedBuffer(std::int64_t bytes) {
  bytes_ = bytes;
  const BesideNoCapture turn;
  if (bytes > 0) LODE_CUDA(cudaMallocHost(&data_, static_cast<std::size_t>(bytes)));
}

void copy(void* to, const void* from, std::int64_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  flush_launches();
  LODE_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream));
}
void fill(void* at, int byte, std::int64_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  flush_launches();
  LODE_CUDA(cudaMemsetAsync(at, byte, static_cast<std::size_t>(bytes), stream));
}

void copy_numbers(void* to, const PinnedBuffer& from, std::int64_t bytes, StreamHandle stream) {
  constexpr std::int64_t kMost = 4096;
  if (bytes > kMost || !holds_back(stream)) return copy(to, from.as<void>(), bytes, stream);
  Launch(1, kCopyThreads, 0, stream)(copy_kernel, static_cast<std::uint32_t*>(to), from.as<std::uint32_t>(),
                                     static_cast<int>(bytes / 4));
}

Graph::~Graph() {
  if (exec_ == nullptr) return;
  const BesideNoCapture turn;
  cudaGraphExecDestroy(exec_);
}
void Graph::begin(StreamHandle stream) {
  flush_launches();
  captures().lock();
  captures_here = true;
  if (const cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
      status != cudaSuccess) {
    const CaptureEnds ends;
    check(status, "cudaStreamBeginCapture");
  }
}
Graph Graph::end(StreamHandle stream) {
  const CaptureEnds ends;  // a graph that is instantiated allocates and loads, too
  cudaGraph_t graph = nullptr;
  LODE_CUDA(cudaStreamEndCapture(stream, &graph));
  Graph result;
  const cudaError_t status = cudaGraphInstantiate(&result.exec_, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "cudaGraphInstantiate");
  return result;
}
void Graph::abandon(StreamHandle stream) noexcept {
  if (!captures_here) return;  // it was its end that failed
  cudaGraph_t graph = nullptr;
  const CaptureEnds ends;
  cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}
void Graph::launch(StreamHandle stream) const {
  flush_launches();
  LODE_CUDA(cudaGraphLaunch(exec_, stream));
}

Timer::Timer() {
  const BesideNoCapture turn;
  LODE_CUDA(cudaEventCreate(&start_));
  LODE_CUDA(cudaEventCreate(&stop_));
}
Timer::~Timer() {
  const BesideNoCapture turn;
  cudaEventDestroy(start_);
  cudaEventDestroy(stop_);
}
void Timer::start(StreamHandle stream) {
  flush_launches();
  LODE_CUDA(cudaEventRecord(start_, stream));
}
void Timer::stop(StreamHandle stream) {
  flush_launches();
  LODE_CUDA(cudaEventRecord(stop_, stream));
}
double Timer::microseconds() {
  LODE_CUDA(cudaEventSynchronize(stop_));
  float milliseconds = 0;
  LODE_CUDA(cudaEventElapsedTime(&milliseconds, start_, stop_));
  return 1e3 * static_cast<double>(milliseconds);
}

}  // namespace lode::cuda
