// SPDX-License-Identifier: Apache-2.0
// Chooses the delta rule that goes with the table that kernels() has chosen.
#include "kernels/delta_rule.h"

#include "kernels/family.h"

namespace lode {

extern const DeltaKernels kScalarDelta;
#if defined(__x86_64__)
extern const DeltaKernels kAvx2Delta;
extern const DeltaKernels kAvx512Delta;
#endif

namespace {

const KernelFamily<DeltaKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<DeltaKernels> all(&kScalarDelta, &kAvx2Delta, &kAvx512Delta);
#else
  static const KernelFamily<DeltaKernels> all(&kScalarDelta);
#endif
  return all;
}

}  // namespace

std::span<const DeltaKernels* const> supported_delta_kernels() {
  return family().supported();
}

const DeltaKernels& delta_kernels() {
  return family().best();
}

}  // namespace lode
