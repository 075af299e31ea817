// SPDX-License-Identifier: Apache-2.0
// A flag says which call a rank's part is there for. Slots alternate, so a part is overwritten two calls later
// at the earliest; by then this rank has seen the others' flags of the call in between, which each of them sets
// only once its own kernel of the call before has ended.
#include <algorithm>
#include <atomic>

#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/reduce/group_exchange.h"
#include "kernels/cuda/reduce/nccl.h"

namespace lode::cuda {

namespace {

constexpr int kMostRanks = 8, kThreads = 256, kMostBlocks = 64;
constexpr std::int64_t kSmallBytes = std::int64_t{64} << 10;  // larger messages are NCCL's, where it is
constexpr unsigned long long kMostWait = 30'000'000'000ull;   // ns: a rank that is so late has failed
constexpr int kLooksBetweenStops = 256;                       // the word is in host memory

struct Meeting {
  int ranks = 0, rank = 0;
  const float* parts[kMostRanks] = {};   // of this slot
  unsigned* arrived[kMostRanks] = {};    // [rank that arrived, block]: the last call it arrived for
  unsigned* calls = nullptr;             // [blocks] of this rank that are over
  volatile unsigned* stopped = nullptr;  // host memory
};
struct SumParams : Meeting {
  float* to = nullptr;
  std::int64_t count = 0;
  bool add = false;
};
struct MergeParams : Meeting {
  float* to = nullptr;  // [rows, 4 * fours]
  std::int64_t rows = 0;
  int fours = 0;
};
struct GatherParams : Meeting {
  float* to = nullptr;  // [ranks, count]
  std::int64_t count = 0;
};

__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
/// From where it is, not from this SM's cache.
__device__ __forceinline__ float4 load_fresh(const float4* at) {
  float4 x;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ float load_fresh(const float* at) {
  float x;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/// Thread r tells rank r that this rank's part is there and waits for rank r's.
__device__ void meet(const Meeting& p) {
  const unsigned call = p.calls[blockIdx.x] + 1;

  const int other = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (other < p.ranks) {
    __threadfence_system();
    store_release(p.arrived[other] + p.rank * kMostBlocks + block, call);
    const unsigned* const from = p.arrived[p.rank] + other * kMostBlocks + block;
    const unsigned long long begin = nanoseconds();
    for (int looks = 1; static_cast<int>(load_acquire(from) - call) < 0; ++looks) {
      if (looks % kLooksBetweenStops != 0) continue;
      if (*p.stopped != 0) break;
      if (nanoseconds() - begin < kMostWait) continue;
      *p.stopped = 1;
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call;
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumParams p, bool early) {
  if (early) release_successor();
  wait_for_predecessor();
  meet(p);
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x,
                     step = std::int64_t{gridDim.x} * kThreads, fours = p.count / 4;
  auto* const to = reinterpret_cast<float4*>(p.to);
  for (std::int64_t i = first; i < fours; i += step) {
    float4 part[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < p.ranks) part[r] = load_fresh(reinterpret_cast<const float4*>(p.parts[r]) + i);
    float4 sum = part[0];
#pragma unroll
    for (int r = 1; r < kRanks; ++r)
      if (r < p.ranks) sum = plus(sum, part[r]);
    to[i] = p.add ? plus(to[i], sum) : sum;
  }
  for (std::int64_t i = 4 * fours + first; i < p.count; i += step) {
    float sum = load_fresh(p.parts[0] + i);
    for (int r = 1; r < p.ranks; ++r) sum += load_fresh(p.parts[r] + i);
    p.to[i] = p.add ? p.to[i] + sum : sum;
  }
}

// A part whose lse is NaN makes the row NaN; what an empty part holds is no number.
template <int kRanks>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p, bool early) {
  if (early) release_successor();
  wait_for_predecessor();
  meet(p);
  const std::int64_t all = p.rows * p.fours, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += step) {
    const std::int64_t row = i / p.fours;
    float4 part[kRanks], merged = {};
    float weight[kRanks], peak = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      weight[r] = -INFINITY;
      if (r >= p.ranks) continue;
      part[r] = load_fresh(reinterpret_cast<const float4*>(p.parts[r]) + i);
      weight[r] = load_fresh(p.parts[r] + 4 * all + row);
    }
#pragma unroll
    for (const float lse : weight) peak = fmaxf(peak, lse);
    const float base = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
    for (float& w : weight) w = expf(w - base), sum += w;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= p.ranks || weight[r] == 0.0f) continue;
      const float w = weight[r] / sum;
      merged = plus(merged, {w * part[r].x, w * part[r].y, w * part[r].z, w * part[r].w});
    }
    reinterpret_cast<float4*>(p.to)[i] = merged;
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherParams p, bool early) {
  if (early) release_successor();
  wait_for_predecessor();
  meet(p);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.count; i += step)
    for (int r = 0; r < p.ranks; ++r) p.to[r * p.count + i] = load_fresh(p.parts[r] + i);
}

__global__ void __launch_bounds__(kThreads) add_kernel(const float* from, std::int64_t count, float* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    to[i] += from[i];
}

unsigned blocks_for(std::int64_t numbers, std::int64_t most) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((numbers + kThreads - 1) / kThreads, 1, most));
}

/// The calling thread's device while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { use_device(device); }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

std::string name_of_device(int device) {
  cudaDeviceProp properties{};
  LODE_CUDA(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

void expect_usable(std::span<const int> devices) {
  const int there = device_count();
  if (devices.empty() || std::ssize(devices) > kMostRanks)
    throw InputError("expected 1 to " + std::to_string(kMostRanks) + " GPUs that share a model, found " +
                     std::to_string(devices.size()));
  for (const int device : devices) {
    if (device < 0 || device >= there)
      throw InputError("expected " + std::to_string(devices.size()) + " GPUs, found " +
                       std::to_string(there));
    const std::string name = name_of_device(device), first = name_of_device(devices.front());
    if (name != first)
      throw InputError("expected GPUs of one kind, found " + first + " and " + name +
                       ": CUDA_VISIBLE_DEVICES names those to use");
  }
}

/// Whether every GPU can read every other's memory; asks for it.
bool join_peers(std::span<const int> devices) {
  for (const int from : devices) {
    for (const int other : devices) {
      int can = 1;
      if (other != from) LODE_CUDA(cudaDeviceCanAccessPeer(&can, from, other));
      if (can == 0) return false;
    }
  }
  for (const int from : devices) {
    const OnDevice here(from);
    for (const int other : devices) {
      if (other == from) continue;
      const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
      static_cast<void>(cudaGetLastError());
      if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled) return false;
    }
  }
  return true;
}

}  // namespace

void use_device(int device) {
  LODE_CUDA(cudaSetDevice(device));
}

struct DeviceGroup::Impl {
  std::vector<int> devices;
  bool peers = false, apart = true;  ///< apart: no device is named twice
  std::unique_ptr<Nccl> nccl;
  std::string way;

  bool by_nccl(std::int64_t bytes) const { return nccl != nullptr && (!peers || bytes > kSmallBytes); }
};

DeviceGroup::DeviceGroup(std::vector<int> devices, GpuSum by) : impl_(new Impl) {
  Impl& m = *impl_;
  expect_usable(devices);
  m.devices = std::move(devices);
  std::vector<int> sorted = m.devices;
  std::sort(sorted.begin(), sorted.end());
  m.apart = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  std::string library = "without NCCL";
  m.peers = by != GpuSum::nccl && join_peers(m.devices);
  if (by != GpuSum::peers && m.apart) m.nccl = Nccl::open(m.devices, library);
  if (!m.peers && m.nccl == nullptr)
    throw RunError("GPUs that share a model need NCCL or must be able to read each other's memory: found " +
                   library + (by == GpuSum::nccl ? "" : " and no such GPUs"));
  if (m.nccl != nullptr) {
    const std::int64_t counts[] = {1 << 10, kSmallBytes / 4, 1 << 20, 1 << 22};
    m.nccl->warm_up(counts);
  }
  const std::string kernel = "a kernel over peer memory";
  m.way = m.nccl == nullptr ? kernel : m.peers ? kernel + " up to 64 KiB, " + library + " above" : library;
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
  return impl_->peers;
}

struct GroupExchange::Impl {
  const DeviceGroup::Impl& group;
  std::int64_t slot = 0;               ///< numbers from one slot to the next
  std::vector<Buffer> parts;           // [ranks] of [2, slot]
  std::vector<Buffer> arrived, calls;  // [ranks] of [kMostRanks, kMostBlocks] and [kMostBlocks]
  PinnedBuffer stopped;

  int ranks() const { return static_cast<int>(group.devices.size()); }
  float* part(int rank, int which) const {
    return parts[static_cast<std::size_t>(rank)].as<float>() + which * slot;
  }
  template <class Params>
  Params params(int rank, int which) const {
    Params p;
    p.ranks = ranks();
    p.rank = rank;
    for (int r = 0; r < p.ranks; ++r) {
      p.parts[r] = part(r, which);
      p.arrived[r] = arrived[static_cast<std::size_t>(r)].as<unsigned>();
    }
    p.calls = calls[static_cast<std::size_t>(rank)].as<unsigned>();
    p.stopped = stopped.as<unsigned>();
    return p;
  }
  /// A kernel for two, four or the most ranks, for so many threads' worth of work.
  template <class Params, class Kernel>
  void launch(const Params& p, std::int64_t work, StreamHandle stream, const Kernel& kernel) const {
    // On one GPU the kernel behind must not take the room that the other rank needs to come here.
    const bool early = group.apart;
    const EarlyLaunch launch(dim3(blocks_for(work, kMostBlocks)), kThreads, 0, 1, stream, early);
    launch(kernel, p, early);
  }
};

GroupExchange::GroupExchange(const DeviceGroup& group, std::int64_t most)
    : impl_(new Impl{.group = group.impl()}) {
  Impl& m = *impl_;
  m.slot = (most + 63) / 64 * 64;
  m.stopped = PinnedBuffer(sizeof(unsigned));
  *m.stopped.as<unsigned>() = 0;
  for (const int device : m.group.devices) {
    const OnDevice here(device);
    const Stream stream;
    const auto zeroed = [&](std::int64_t bytes) {
      Buffer buffer(bytes, "parts of several GPUs");
      fill(buffer.as<void>(), 0, bytes, stream.get());
      return buffer;
    };
    m.parts.push_back(zeroed(2 * m.slot * std::int64_t{sizeof(float)}));
    m.arrived.push_back(zeroed(kMostRanks * kMostBlocks * std::int64_t{sizeof(unsigned)}));
    m.calls.push_back(zeroed(kMostBlocks * std::int64_t{sizeof(unsigned)}));
    stream.synchronize();
  }
}
GroupExchange::~GroupExchange() = default;

std::int64_t GroupExchange::bytes() const {
  const Impl& m = *impl_;
  return m.parts.front().bytes() + m.arrived.front().bytes() + m.calls.front().bytes();
}
float* GroupExchange::part(int rank, int slot) const {
  return impl_->part(rank, slot);
}

void GroupExchange::sum(int rank, int slot, std::int64_t count, float* to, bool add,
                        StreamHandle stream) const {
  const Impl& m = *impl_;
  LODE_ASSERT(count <= m.slot);
  if (count == 0) return;
  const std::int64_t bytes = count * std::int64_t{sizeof(float)};
  if (m.group.by_nccl(bytes)) {
    float* const own = m.part(rank, slot);
    m.group.nccl->sum(rank, own, count, stream);
    if (!add) return copy(to, own, bytes, stream);
    Launch(blocks_for(count, 1024), kThreads, 0, stream)(add_kernel, own, count, to);
    return;
  }
  auto p = m.params<SumParams>(rank, slot);
  p.to = to;
  p.count = count;
  p.add = add;
  m.launch(p, (count + 3) / 4, stream,
           p.ranks <= 2   ? sum_kernel<2>
           : p.ranks <= 4 ? sum_kernel<4>
                          : sum_kernel<kMostRanks>);
}

void GroupExchange::merge(int rank, int slot, std::int64_t rows, int d, float* to,
                          StreamHandle stream) const {
  const Impl& m = *impl_;
  LODE_ASSERT(rows * (d + 1) <= m.slot && d % 4 == 0 && m.group.peers);
  if (rows == 0) return;
  auto p = m.params<MergeParams>(rank, slot);
  p.to = to;
  p.rows = rows;
  p.fours = d / 4;
  m.launch(p, rows * p.fours, stream,
           p.ranks <= 2   ? merge_kernel<2>
           : p.ranks <= 4 ? merge_kernel<4>
                          : merge_kernel<kMostRanks>);
}

void GroupExchange::gather(int rank, int slot, std::int64_t count, void* to, StreamHandle stream) const {
  const Impl& m = *impl_;
  LODE_ASSERT(count <= m.slot && m.group.peers);
  if (count == 0) return;
  auto p = m.params<GatherParams>(rank, slot);
  p.to = static_cast<float*>(to);
  p.count = count;
  m.launch(p, count, stream, gather_kernel);
}

void GroupExchange::stop() noexcept {
  std::atomic_ref<unsigned>(*impl_->stopped.as<unsigned>()).store(1);
}

void GroupExchange::expect_whole() const {
  if (std::atomic_ref<unsigned>(*impl_->stopped.as<unsigned>()).load() == 0) return;
  throw RunError(
      "a GPU that shares the model failed or was more than 30 s late: this context is lost; read the text "
      "again");
}

}  // namespace lode::cuda
