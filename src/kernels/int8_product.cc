// SPDX-License-Identifier: Apache-2.0
// Chooses the 8-bit products that go with the table that kernels() has chosen.
#include "kernels/int8_product.h"

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"

namespace lode {

extern const Int8ProductKernels kScalarInt8Products;
#if defined(__x86_64__)
extern const Int8ProductKernels kAvx2Int8Products;
extern const Int8ProductKernels kAvx512Int8Products;
extern const Int8ProductKernels kAvx512VnniInt8Products;
#endif

namespace {

/// Those that run wherever this table of kernels runs, the best last.
std::vector<const Int8ProductKernels*> going_with(const KernelTable& table) {
#if defined(__x86_64__)
  if (table.name == "avx2") return {&kAvx2Int8Products};
  if (table.name.starts_with("avx512") || table.name == "amx") {
    std::vector<const Int8ProductKernels*> found = {&kAvx512Int8Products};
    if (__builtin_cpu_supports("avx512vnni")) found.push_back(&kAvx512VnniInt8Products);
    return found;
  }
#endif
  return {&kScalarInt8Products};
}

std::vector<const Int8ProductKernels*> find_supported() {
  std::vector<const Int8ProductKernels*> all;
  for (const KernelTable* table : supported_kernels()) {
    for (const Int8ProductKernels* one : going_with(*table)) {
      if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    }
  }
  return all;
}

}  // namespace

std::span<const Int8ProductKernels* const> supported_int8_product_kernels() {
  static const std::vector<const Int8ProductKernels*> tables = find_supported();
  return tables;
}

const Int8ProductKernels& int8_product_kernels() {
  static const Int8ProductKernels& table = *going_with(kernels()).back();
  return table;
}

}  // namespace lode
