// SPDX-License-Identifier: Apache-2.0
// Chooses the signature kernels that go with the table that kernels() has chosen.
#include "kernels/signature.h"

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"

namespace lode {

extern const SignatureKernels kScalarSignatures;
#if defined(__x86_64__)
extern const SignatureKernels kAvx2Signatures;
extern const SignatureKernels kAvx512Signatures;
extern const SignatureKernels kAvx512VpopcntdqSignatures;
#endif

namespace {

/// Those that run wherever this table of kernels runs, the best last.
std::vector<const SignatureKernels*> going_with(const KernelTable& table) {
#if defined(__x86_64__)
  if (table.name == "avx2") return {&kAvx2Signatures};
  if (table.name.starts_with("avx512") || table.name == "amx") {
    std::vector<const SignatureKernels*> found = {&kAvx512Signatures};
    if (__builtin_cpu_supports("avx512vpopcntdq")) found.push_back(&kAvx512VpopcntdqSignatures);
    return found;
  }
#endif
  return {&kScalarSignatures};
}

std::vector<const SignatureKernels*> find_supported() {
  std::vector<const SignatureKernels*> all;
  for (const KernelTable* table : supported_kernels()) {
    for (const SignatureKernels* one : going_with(*table)) {
      if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    }
  }
  return all;
}

}  // namespace

std::span<const SignatureKernels* const> supported_signature_kernels() {
  static const std::vector<const SignatureKernels*> tables = find_supported();
  return tables;
}

const SignatureKernels& signature_kernels() {
  static const SignatureKernels& table = *going_with(kernels()).back();
  return table;
}

}  // namespace lode
