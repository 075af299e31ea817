// SPDX-License-Identifier: Apache-2.0
// Chooses the signature kernels that go with the table that kernels() has chosen.
#include "kernels/select/signature.h"

#include "kernels/family.h"

namespace lode {

extern const SignatureKernels kScalarSignatures;
#if defined(__x86_64__)
extern const SignatureKernels kAvx2Signatures;
extern const SignatureKernels kAvx512Signatures;
extern const SignatureKernels kAvx512VpopcntdqSignatures;
#endif

namespace {

const KernelFamily<SignatureKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<SignatureKernels> all(
      &kScalarSignatures, &kAvx2Signatures, &kAvx512Signatures,
      __builtin_cpu_supports("avx512vpopcntdq") ? &kAvx512VpopcntdqSignatures : nullptr);
#else
  static const KernelFamily<SignatureKernels> all(&kScalarSignatures);
#endif
  return all;
}

}  // namespace

std::span<const SignatureKernels* const> supported_signature_kernels() {
  return family().supported();
}

const SignatureKernels& signature_kernels() {
  return family().best();
}

}  // namespace lode
