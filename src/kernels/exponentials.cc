// SPDX-License-Identifier: Apache-2.0
// Chooses the exponentials that go with the table that kernels() has chosen.
#include "kernels/exponentials.h"

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"

namespace lode {

extern const ExponentialKernels kScalarExponentials;
#if defined(__x86_64__)
extern const ExponentialKernels kAvx2Exponentials;
extern const ExponentialKernels kAvx512Exponentials;
#endif

namespace {

const ExponentialKernels& going_with(const KernelTable& table) {
#if defined(__x86_64__)
  if (table.name == "avx2") return kAvx2Exponentials;
  if (table.name.starts_with("avx512") || table.name == "amx") return kAvx512Exponentials;
#endif
  return kScalarExponentials;
}

std::vector<const ExponentialKernels*> find_supported() {
  std::vector<const ExponentialKernels*> all;
  for (const KernelTable* table : supported_kernels()) {
    const ExponentialKernels* const one = &going_with(*table);
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
  }
  return all;
}

}  // namespace

std::span<const ExponentialKernels* const> supported_exponential_kernels() {
  static const std::vector<const ExponentialKernels*> tables = find_supported();
  return tables;
}

const ExponentialKernels& exponential_kernels() {
  static const ExponentialKernels& table = going_with(kernels());
  return table;
}

}  // namespace lode
