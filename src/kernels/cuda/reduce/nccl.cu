// SPDX-License-Identifier: Apache-2.0
// The few calls of NCCL that are used, by name, with the values of its enumerations as NVIDIA documents them (they
// are part of the library's binary interface and equal in all versions 2.x).
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/reduce/group_exchange.h"
#include "kernels/cuda/reduce/nccl.h"

namespace lode::cuda {

namespace {

constexpr int kFloat32 = 7, kSum = 0;

/// The library's functions; every one returns 0 for success.
struct Api {
  int (*version)(int*);
  const char* (*error_string)(int);
  int (*init_all)(void** comms, int count, const int* devices);
  int (*destroy)(void* comm);
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* from, void* to, std::size_t count, int type, int operation, void* comm,
                    StreamHandle);
};

template <class F>
bool resolve(void* library, const char* name, F& to) {
  to = reinterpret_cast<F>(dlsym(library, name));
  return to != nullptr;
}
bool resolve_all(void* library, Api& api) {
  return resolve(library, "ncclGetVersion", api.version) &&
         resolve(library, "ncclGetErrorString", api.error_string) &&
         resolve(library, "ncclCommInitAll", api.init_all) &&
         resolve(library, "ncclCommDestroy", api.destroy) &&
         resolve(library, "ncclGroupStart", api.group_start) &&
         resolve(library, "ncclGroupEnd", api.group_end) && resolve(library, "ncclAllReduce", api.all_reduce);
}

/// What must hold before the library starts. Multicast over NVLink is never used: a program that ends badly
/// can leave it in a state in which other programs' GPUs fail. Connections are made at once and buffers not
/// registered later: both would make a captured call wait for another rank's.
void set_environment() {
  setenv("NCCL_NVLS_ENABLE", "0", /*replace=*/1);
  for (const char* name : {"NCCL_RUNTIME_CONNECT", "NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER"})
    setenv(name, "0", /*replace=*/0);
}

/// Where the loader looks first (LD_LIBRARY_PATH, ld.so.conf), then the toolkit's own folders.
std::vector<std::string> candidates() {
  std::vector<std::string> all = {"libnccl.so.2"};
  for (const char* const folder : {"/usr/local/cuda/lib64/", "/usr/local/cuda/lib/"})
    all.push_back(folder + all.front());
  return all;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

struct Nccl::Impl {
  Api api{};
  std::vector<void*> comms;
  std::vector<int> devices;

  void succeed(int status, const char* call) const {
    if (status != 0)
      throw RunError(std::string("the GPUs failed: NCCL's ") + call + ": " + api.error_string(status));
  }
};

Nccl::Nccl() : impl_(new Impl) {}
Nccl::~Nccl() {
  const BesideNoCapture turn;
  for (void* const comm : impl_->comms) impl_->api.destroy(comm);
}

std::unique_ptr<Nccl> Nccl::open(std::span<const int> devices, std::string& found) {
  set_environment();
  void* library = nullptr;
  for (const std::string& path : candidates())
    if (library == nullptr) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found = "no NCCL (libnccl.so.2; LD_LIBRARY_PATH says where)";
    return nullptr;
  }
  std::unique_ptr<Nccl> nccl(new Nccl);
  Impl& m = *nccl->impl_;
  int version = 0;
  if (!resolve_all(library, m.api) || m.api.version(&version) != 0) {
    found = "an NCCL without the calls that are needed";
    return nullptr;
  }
  m.devices.assign(devices.begin(), devices.end());
  std::vector<void*> comms(devices.size());
  const BesideNoCapture turn;
  const int status = m.api.init_all(comms.data(), static_cast<int>(devices.size()), devices.data());
  if (status != 0) {
    found = std::string("an NCCL that says: ") + m.api.error_string(status);
    return nullptr;
  }
  m.comms = std::move(comms);
  found = "NCCL " + version_text(version);
  return nccl;
}

void Nccl::sum(int rank, float* numbers, std::int64_t count, StreamHandle stream) const {
  flush_launches();
  const Impl& m = *impl_;
  m.succeed(m.api.all_reduce(numbers, numbers, static_cast<std::size_t>(count), kFloat32, kSum,
                             m.comms[static_cast<std::size_t>(rank)], stream),
            "ncclAllReduce");
}

void Nccl::warm_up(std::span<const std::int64_t> counts) const {
  const Impl& m = *impl_;
  const int before = current_device();
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Buffer> numbers;
  for (const int device : m.devices) {
    use_device(device);
    streams.push_back(std::make_unique<Stream>());
    numbers.emplace_back(*std::max_element(counts.begin(), counts.end()) * 4, "a first sum over GPUs");
    fill(numbers.back().as<void>(), 0, numbers.back().bytes(), streams.back()->get());
  }
  for (const std::int64_t count : counts) {
    m.succeed(m.api.group_start(), "ncclGroupStart");
    for (std::size_t rank = 0; rank < m.comms.size(); ++rank)
      sum(static_cast<int>(rank), numbers[rank].as<float>(), count, streams[rank]->get());
    m.succeed(m.api.group_end(), "ncclGroupEnd");
  }
  for (std::size_t rank = 0; rank < streams.size(); ++rank) {
    use_device(m.devices[rank]);
    streams[rank]->synchronize();
  }
  use_device(before);
}

}  // namespace lode::cuda
