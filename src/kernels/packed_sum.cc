// SPDX-License-Identifier: Apache-2.0
// Chooses the packed sums that go with the table that kernels() has chosen.
#include "kernels/packed_sum.h"

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"

namespace lode {

extern const PackedSumKernels kScalarPackedSums;
#if defined(__x86_64__)
extern const PackedSumKernels kAvx2PackedSums;
extern const PackedSumKernels kAvx512PackedSums;
#endif

namespace {

const PackedSumKernels& going_with(const KernelTable& table) {
#if defined(__x86_64__)
  if (table.name == "avx2") return kAvx2PackedSums;
  if (table.name.starts_with("avx512") || table.name == "amx") return kAvx512PackedSums;
#endif
  return kScalarPackedSums;
}

std::vector<const PackedSumKernels*> find_supported() {
  std::vector<const PackedSumKernels*> all;
  for (const KernelTable* table : supported_kernels()) {
    const PackedSumKernels* const one = &going_with(*table);
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
  }
  return all;
}

}  // namespace

std::span<const PackedSumKernels* const> supported_packed_sum_kernels() {
  static const std::vector<const PackedSumKernels*> tables = find_supported();
  return tables;
}

const PackedSumKernels& packed_sum_kernels() {
  static const PackedSumKernels& table = going_with(kernels());
  return table;
}

}  // namespace lode
