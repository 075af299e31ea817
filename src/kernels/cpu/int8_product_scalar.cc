// SPDX-License-Identifier: Apache-2.0
// The 8-bit products in plain C++: the specification of the others.
#include "kernels/cpu/int8_product-inl.h"

namespace lode {
namespace {

void products(const std::int16_t* x, int vectors, const std::int8_t* w, std::int64_t rows, std::int64_t k,
              std::int32_t* y) noexcept {
  for (int m = 0; m < vectors; ++m) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::int32_t sum = 0;
      const std::int8_t* const piece = w + r / kInt8Rows * kInt8Rows * k + r % kInt8Rows * kInt8Columns;
      for (std::int64_t i = 0; i < k; ++i)
        sum += std::int32_t{x[m * k + i]} *
               piece[i / kInt8Columns * kInt8Columns * kInt8Rows + i % kInt8Columns];
      y[m * rows + r] = sum;
    }
  }
}

}  // namespace

extern const Int8ProductKernels kScalarInt8Products;
constinit const Int8ProductKernels kScalarInt8Products = {"scalar", encode, products};

}  // namespace lode
