// SPDX-License-Identifier: Apache-2.0
// oneDNN's float32 matrix product, on the calling thread alone.
#pragma once

#include <cstdint>

namespace lode {

/// A row-major operand; `transposed`: the product takes its transpose.
struct GemmOperand {
  const float* data = nullptr;
  std::int64_t stride = 0;  ///< elements from one stored row to the next
  bool transposed = false;
};

/// c[m, n] = op(a)[m, k] op(b)[k, n] + beta c, row-major, `stride` elements from one row of c to the next. No
/// thread but the caller works, so that a program keeps its one pool of threads; the same bits for the same
/// shapes. RunError when oneDNN refuses.
void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand a, GemmOperand b, float beta, float* c,
           std::int64_t stride);

}  // namespace lode
