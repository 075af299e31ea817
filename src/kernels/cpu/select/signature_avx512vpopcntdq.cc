// SPDX-License-Identifier: Apache-2.0
// The signature kernels for AVX-512 F, BW, DQ, VL and VPOPCNTDQ.
#include "kernels/cpu/select/signature_avx512-inl.h"

namespace lode {
extern const SignatureKernels kAvx512VpopcntdqSignatures;
constinit const SignatureKernels kAvx512VpopcntdqSignatures = LODE_SIGNATURE_TABLE("avx512vpopcntdq");
}  // namespace lode
