// SPDX-License-Identifier: Apache-2.0
// Chooses the search for large scores that goes with the table that kernels() has chosen.
#include "kernels/select/filter_above.h"

#include "kernels/family.h"

namespace lode {

extern const ReachingKernels kScalarReaching;
#if defined(__x86_64__)
extern const ReachingKernels kAvx2Reaching;
extern const ReachingKernels kAvx512Reaching;
#endif

namespace {

const KernelFamily<ReachingKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<ReachingKernels> all(&kScalarReaching, &kAvx2Reaching, &kAvx512Reaching);
#else
  static const KernelFamily<ReachingKernels> all(&kScalarReaching);
#endif
  return all;
}

}  // namespace

std::span<const ReachingKernels* const> supported_reaching_kernels() {
  return family().supported();
}

const ReachingKernels& reaching_kernels() {
  return family().best();
}

}  // namespace lode
