// SPDX-License-Identifier: Apache-2.0
// Products of float32 matrices whose operands may lie transposed, as the backward pass of a network needs
// them.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// c[m, n] = op(a)[m, k] op(b)[k, n] (+ c), all row-major and dense.
struct Product {
  const float *a = nullptr, *b = nullptr;
  float* c = nullptr;
  std::int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;  ///< a is stored [k, m]
  bool b_transposed = false;  ///< b is stored [n, k]
  bool add = false;
};

/// In float32; every output is one chain of fused multiply-adds in ascending order of k.
void multiply_f32(const Product& product, StreamHandle stream);

class CublasLt;

/// Products by cuBLASLt with operands rounded to TF32, or by multiply_f32 where there is no library, where it
/// has no algorithm, and when `exact`. One per stream.
class Products {
 public:
  explicit Products(bool exact);
  ~Products();
  void multiply(const Product& product, StreamHandle stream);
  /// The library in use, or why there is none.
  const std::string& found() const { return found_; }

 private:
  std::unique_ptr<CublasLt> library_;
  std::string found_;
};

}  // namespace lode::cuda
