// SPDX-License-Identifier: Apache-2.0
// The signature kernels for AVX-512 F, BW, DQ, VL.
#include "kernels/cpu/select/signature_avx512-inl.h"

namespace lode {
extern const SignatureKernels kAvx512Signatures;
constinit const SignatureKernels kAvx512Signatures = LODE_SIGNATURE_TABLE("avx512");
}  // namespace lode
