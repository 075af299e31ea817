// SPDX-License-Identifier: Apache-2.0
// Arrays of ours on a GPU, which others take by DLPack, and the streams of others.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arrays.h"

namespace lode::python {

/// Device memory, the stream in whose order it was made and filled, and the moment it was.
struct CudaMemory;

/// An array in C order on a GPU. Its memory is given back in the order of the stream that it was made in.
class CudaArray {
 public:
  CudaArray(std::shared_ptr<CudaMemory> memory, void* data, std::vector<std::size_t> shape,
            nb::dlpack::dtype type, int device)
      : memory_(std::move(memory)), data_(data), shape_(std::move(shape)), type_(type), device_(device) {}

  void* data() const { return data_; }
  const std::vector<std::size_t>& shape() const { return shape_; }
  nb::dlpack::dtype type() const { return type_; }
  int device() const { return device_; }
  CudaMemory& memory() const { return *memory_; }
  std::size_t bytes() const;

 private:
  std::shared_ptr<CudaMemory> memory_;
  void* data_;
  std::vector<std::size_t> shape_;
  nb::dlpack::dtype type_;
  int device_;
};

/// CUDA's handle of a stream: None (0, the legacy default stream), an int, or an object with cuda_stream (PyTorch),
/// ptr (CuPy) or __cuda_stream__. TypeError for others.
std::uintptr_t stream_handle(nb::handle stream);

// What a build with CUDA does (gpu_calls.cc), and one without refuses (no_gpu_calls.cc).

/// Makes work in a stream wait until the array has been filled.
void hold_up(const CudaArray& array, std::uintptr_t stream);
/// Copies of all bytes, in the order of a stream; both wait for them.
void download(const CudaArray& array, void* to, nb::handle stream);
CudaArray upload(const Array& array, int device, nb::handle stream);
int gpu_count();

}  // namespace lode::python
