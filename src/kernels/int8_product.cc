// SPDX-License-Identifier: Apache-2.0
// Chooses the 8-bit products that go with the table that kernels() has chosen.
#include "kernels/int8_product.h"

#include "kernels/family.h"

namespace lode {

extern const Int8ProductKernels kScalarInt8Products;
#if defined(__x86_64__)
extern const Int8ProductKernels kAvx2Int8Products;
extern const Int8ProductKernels kAvx512Int8Products;
extern const Int8ProductKernels kAvx512VnniInt8Products;
#endif

namespace {

const KernelFamily<Int8ProductKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<Int8ProductKernels> all(
      &kScalarInt8Products, &kAvx2Int8Products, &kAvx512Int8Products,
      __builtin_cpu_supports("avx512vnni") ? &kAvx512VnniInt8Products : nullptr);
#else
  static const KernelFamily<Int8ProductKernels> all(&kScalarInt8Products);
#endif
  return all;
}

}  // namespace

std::span<const Int8ProductKernels* const> supported_int8_product_kernels() {
  return family().supported();
}

const Int8ProductKernels& int8_product_kernels() {
  return family().best();
}

}  // namespace lode
