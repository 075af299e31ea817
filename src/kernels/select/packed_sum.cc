// SPDX-License-Identifier: Apache-2.0
// Chooses the packed sums that go with the table that kernels() has chosen.
#include "kernels/select/packed_sum.h"

#include "kernels/family.h"

namespace lode {

extern const PackedSumKernels kScalarPackedSums;
#if defined(__x86_64__)
extern const PackedSumKernels kAvx2PackedSums;
extern const PackedSumKernels kAvx512PackedSums;
#endif

namespace {

const KernelFamily<PackedSumKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<PackedSumKernels> all(&kScalarPackedSums, &kAvx2PackedSums, &kAvx512PackedSums);
#else
  static const KernelFamily<PackedSumKernels> all(&kScalarPackedSums);
#endif
  return all;
}

}  // namespace

std::span<const PackedSumKernels* const> supported_packed_sum_kernels() {
  return family().supported();
}

const PackedSumKernels& packed_sum_kernels() {
  return family().best();
}

}  // namespace lode
