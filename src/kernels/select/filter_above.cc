// SPDX-License-Identifier: Apache-2.0
// Chooses the search for large scores that goes with the table that kernels() has chosen.
#include "kernels/select/filter_above.h"

#include "kernels/family.h"

namespace lode {

extern const FilterAboveKernels kScalarFilterAbove;
#if defined(__x86_64__)
extern const FilterAboveKernels kAvx2FilterAbove;
extern const FilterAboveKernels kAvx512FilterAbove;
#endif

namespace {

const KernelFamily<FilterAboveKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<FilterAboveKernels> all(&kScalarFilterAbove, &kAvx2FilterAbove,
                                                    &kAvx512FilterAbove);
#else
  static const KernelFamily<FilterAboveKernels> all(&kScalarFilterAbove);
#endif
  return all;
}

}  // namespace

std::span<const FilterAboveKernels* const> supported_filter_above_kernels() {
  return family().supported();
}

const FilterAboveKernels& filter_above_kernels() {
  return family().best();
}

}  // namespace lode
