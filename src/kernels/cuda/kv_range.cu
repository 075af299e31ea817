// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>

#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/kv_range.h"

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

std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

KvRange::KvRange(KvLayout layout, int layers, std::int64_t max_tokens)
    : layout_(layout), layers_(layers), max_tokens_(max_tokens) {
  LODE_CUDA(cudaFree(nullptr));  // the driver's calls need a context
  const CUmemAllocationProp properties = on_this_device();
  std::size_t granularity = 0;
  expect_success(cu().granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
  granularity_ = static_cast<std::int64_t>(granularity);
  layout_.layer_stride = round_up(layout_.layer_bytes(max_tokens), granularity_);
  CUdeviceptr base = 0;
  expect_success(cu().reserve(&base, static_cast<std::size_t>(layout_.layer_stride * layers), 0, 0, 0),
                 "cuMemAddressReserve");
  base_ = reinterpret_cast<char*>(base);
}

KvRange::~KvRange() {
  unmap(0);
  cu().free(reinterpret_cast<CUdeviceptr>(base_), static_cast<std::size_t>(layout_.layer_stride * layers_));
}

void KvRange::back(std::int64_t tokens) {
  const std::int64_t needed = layout_.layer_bytes(tokens);
  if (needed <= backed_) return;
  // An eighth more than needed, so that a growing sequence asks the driver seldom.
  const std::int64_t wanted =
      std::min(layout_.layer_stride, round_up(std::max(needed, backed_ + backed_ / 8), granularity_));
  map_layers(backed_, wanted - backed_);
  backed_ = wanted;
}

std::int64_t KvRange::backed_bytes() const {
  return (backed_ + std::ssize(held_) * granularity_) * layers_;
}

void KvRange::hold(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  const std::int64_t last = (layout_.layer_bytes(end) - 1) / granularity_;
  for (std::int64_t page = begin / kBlockTokens * layout_.block_stride() / granularity_; page <= last;
       ++page) {
    if (held_.contains(page)) continue;
    map_layers(page * granularity_, granularity_);
    held_.insert(page);
  }
}

void KvRange::let_go(std::int64_t begin, std::int64_t end) {
  const std::int64_t first = (layout_.layer_bytes(begin) + granularity_ - 1) / granularity_;
  const std::int64_t last = end / kBlockTokens * layout_.block_stride() / granularity_;  // exclusive
  if (first >= last || held_.lower_bound(first) == held_.lower_bound(last)) return;
  held_.erase(held_.lower_bound(first), held_.lower_bound(last));
  const auto stays = std::stable_partition(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return held_.contains((piece.at - base_) % layout_.layer_stride / granularity_);
  });
  unmap(static_cast<std::size_t>(stays - pieces_.begin()));
}

void KvRange::unmap(std::size_t first_piece) {
  for (; pieces_.size() > first_piece; pieces_.pop_back()) {
    cu().unmap(reinterpret_cast<CUdeviceptr>(pieces_.back().at),
               static_cast<std::size_t>(pieces_.back().bytes));
    cu().release(pieces_.back().handle);
  }
}

/// Gives memory to bytes [offset, offset + bytes) of every layer, or of none.
void KvRange::map_layers(std::int64_t offset, std::int64_t bytes) {
  const CUmemAllocationProp properties = on_this_device();
  const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const std::size_t before = pieces_.size(), size = static_cast<std::size_t>(bytes);
  const auto undo = [&] { unmap(before); };
  for (int layer = 0; layer < layers_; ++layer) {
    char* const at = base_ + layer * layout_.layer_stride + offset;
    CUmemGenericAllocationHandle handle = 0;
    if (const CUresult status = cu().create(&handle, size, &properties, 0); status != CUDA_SUCCESS) {
      undo();
      if (status != CUDA_ERROR_OUT_OF_MEMORY) expect_success(status, "cuMemCreate");
      std::size_t free = 0, total = 0;
      LODE_CUDA(cudaMemGetInfo(&free, &total));
      throw RunError("out of GPU memory: expected " + std::to_string(bytes * layers_ >> 20) +
                     " MiB for keys and values beside the " + std::to_string(backed_bytes() >> 20) +
                     " MiB there, found " + std::to_string(free >> 20) + " MiB free of " +
                     std::to_string(total >> 20) + " MiB");
    }
    if (const CUresult status = cu().map(reinterpret_cast<CUdeviceptr>(at), size, 0, handle, 0);
        status != CUDA_SUCCESS) {
      cu().release(handle);
      undo();
      expect_success(status, "cuMemMap");
    }
    pieces_.push_back({handle, at, bytes});
    if (const CUresult status = cu().access(reinterpret_cast<CUdeviceptr>(at), size, &access, 1);
        status != CUDA_SUCCESS) {
      undo();
      expect_success(status, "cuMemSetAccess");
    }
    // Kernels read whole blocks: rows behind the last token must be numbers.
    LODE_CUDA(cudaMemset(at, 0, size));
  }
  LODE_CUDA(cudaDeviceSynchronize());
}

template <class Copy>
void KvRange::for_blocks(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                         const Copy& copy) const {
  const std::int64_t row = layout_.row_bytes();
  char* const first =
      base_ + layer * layout_.layer_stride + (part == Part::v ? layout_.value_offset() : std::int64_t{0});
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t in_block = at % kBlockTokens;
    const bool whole = in_block == 0 && end - at >= kBlockTokens;
    const std::int64_t blocks = whole ? (end - at) / kBlockTokens : 1;
    const std::int64_t rows = whole ? kBlockTokens : std::min(kBlockTokens - in_block, end - at);
    copy(first + layout_.key_offset(head, at), rows * row, blocks, (at - begin) * row);
    at += blocks * rows;
  }
}

void KvRange::to_host(int layer, int head, Part part, std::int64_t begin, std::int64_t end, void* host,
                      StreamHandle stream) const {
  for_blocks(layer, head, part, begin, end,
             [&](const char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               LODE_CUDA(cudaMemcpy2DAsync(static_cast<char*>(host) + offset, static_cast<std::size_t>(width),
                                           at, static_cast<std::size_t>(layout_.block_stride()),
                                           static_cast<std::size_t>(width), static_cast<std::size_t>(height),
                                           cudaMemcpyDeviceToHost, stream));
             });
}

void KvRange::to_device(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                        const void* host, StreamHandle stream) {
  for_blocks(layer, head, part, begin, end,
             [&](char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               LODE_CUDA(cudaMemcpy2DAsync(at, static_cast<std::size_t>(layout_.block_stride()),
                                           static_cast<const char*>(host) + offset,
                                           static_cast<std::size_t>(width), static_cast<std::size_t>(width),
                                           static_cast<std::size_t>(height), cudaMemcpyHostToDevice, stream));
             });
}

}  // namespace lode::cuda
