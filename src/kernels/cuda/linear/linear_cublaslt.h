// SPDX-License-Identifier: Apache-2.0
// Matrix products by NVIDIA's cuBLASLt, which is opened when the program runs: neither its headers nor the
// library are needed to build, and where it is missing our own kernel takes over.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/product.h"

namespace lode::cuda {

class CublasLt {
 public:
  /// Null when no library is found; `found` then says what was tried, else which library it is.
  static std::unique_ptr<CublasLt> open(std::string& found);
  ~CublasLt();

  /// y[n, out] = x[n, in] w[out, in]^T (+ y), operands of one type, float32 accumulation and result (float32
  /// operands are rounded to TF32). Rows of y are `stride` numbers apart, 0: as many as they have. False when
  /// the library has no algorithm for these shapes; RunError when a call fails.
  bool multiply(const Operand& x, const Operand& w, bool add, float* y, StreamHandle stream,
                std::int64_t stride = 0);
  /// The same of float32 operands that may lie transposed.
  bool multiply(const Product& product, StreamHandle stream);

 private:
  struct Impl;
  explicit CublasLt(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::cuda
