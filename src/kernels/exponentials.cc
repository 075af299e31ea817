// SPDX-License-Identifier: Apache-2.0
// Chooses the exponentials that go with the table that kernels() has chosen.
#include "kernels/exponentials.h"

#include "kernels/family.h"

namespace lode {

extern const ExponentialKernels kScalarExponentials;
#if defined(__x86_64__)
extern const ExponentialKernels kAvx2Exponentials;
extern const ExponentialKernels kAvx512Exponentials;
#endif

namespace {

const KernelFamily<ExponentialKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<ExponentialKernels> all(&kScalarExponentials, &kAvx2Exponentials,
                                                    &kAvx512Exponentials);
#else
  static const KernelFamily<ExponentialKernels> all(&kScalarExponentials);
#endif
  return all;
}

}  // namespace

std::span<const ExponentialKernels* const> supported_exponential_kernels() {
  return family().supported();
}

const ExponentialKernels& exponential_kernels() {
  return family().best();
}

}  // namespace lode
