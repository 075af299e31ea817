// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/cuda/device/pages.h"

namespace lode::cuda {

namespace {

/// The driver's calls, asked of the runtime so that the program starts without a driver.
template <class Function>
Function driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  LODE_CUDA(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
  if (found == nullptr)
    throw RunError(std::string("the NVIDIA driver has no ") + name + ": install a newer one");
  return reinterpret_cast<Function>(found);
}

struct Driver {
  decltype(&cuMemAddressReserve) reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free = driver<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = driver<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = driver<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) access = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemGetAllocationGranularity) granularity =
      driver<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
};

const Driver& cu() {
  static const Driver driver;
  return driver;
}

CUmemAllocationProp on_this_device() {
  int device = 0;
  LODE_CUDA(cudaGetDevice(&device));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

void expect_success(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS)
    throw RunError(std::string("the GPU failed: driver error ") + std::to_string(status) + " (" + what + ")");
}

}  // namespace

std::int64_t page_bytes() {
  LODE_CUDA(cudaFree(nullptr));  // the driver's calls need a context
  const CUmemAllocationProp properties = on_this_device();
  std::size_t granularity = 0;
  expect_success(cu().granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
  return static_cast<std::int64_t>(granularity);
}

char* reserve_addresses(std::int64_t bytes) {
  CUdeviceptr base = 0;
  expect_success(cu().reserve(&base, static_cast<std::size_t>(bytes), 0, 0, 0), "cuMemAddressReserve");
  return reinterpret_cast<char*>(base);
}

void free_addresses(char* at, std::int64_t bytes) noexcept {
  cu().free(reinterpret_cast<CUdeviceptr>(at), static_cast<std::size_t>(bytes));
}

unsigned long long map_pages(char* at, std::int64_t bytes) {
  const CUmemAllocationProp properties = on_this_device();
  const auto size = static_cast<std::size_t>(bytes);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult status = cu().create(&handle, size, &properties, 0); status != CUDA_SUCCESS) {
    if (status != CUDA_ERROR_OUT_OF_MEMORY) expect_success(status, "cuMemCreate");
    return 0;
  }
  try {
    map_again(at, bytes, handle);
  } catch (...) {
    cu().release(handle);
    throw;
  }
  LODE_CUDA(cudaMemset(at, 0, size));
  return handle;
}

void map_again(char* at, std::int64_t bytes, unsigned long long handle) {
  const CUmemAccessDesc access = {on_this_device().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const auto size = static_cast<std::size_t>(bytes);
  expect_success(cu().map(reinterpret_cast<CUdeviceptr>(at), size, 0, handle, 0), "cuMemMap");
  if (const CUresult status = cu().access(reinterpret_cast<CUdeviceptr>(at), size, &access, 1);
      status != CUDA_SUCCESS) {
    unmap_again(at, bytes);
    expect_success(status, "cuMemSetAccess");
  }
}

void unmap_again(char* at, std::int64_t bytes) noexcept {
  flush_launches_quietly();
  cu().unmap(reinterpret_cast<CUdeviceptr>(at), static_cast<std::size_t>(bytes));
}

void unmap_pages(char* at, std::int64_t bytes, unsigned long long handle) noexcept {
  unmap_again(at, bytes);
  cu().release(handle);
}

void copy_apart(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                std::int64_t width, std::int64_t rows, StreamHandle stream) {
  flush_launches();
  LODE_CUDA(cudaMemcpy2DAsync(to, static_cast<std::size_t>(to_stride), from,
                              static_cast<std::size_t>(from_stride), static_cast<std::size_t>(width),
                              static_cast<std::size_t>(rows), cudaMemcpyDefault, stream));
}

void synchronize_device() {
  flush_launches();
  LODE_CUDA(cudaDeviceSynchronize());
}

DeviceMemory device_memory() {
  std::size_t free = 0, total = 0;
  LODE_CUDA(cudaMemGetInfo(&free, &total));
  return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
}

}  // namespace lode::cuda
