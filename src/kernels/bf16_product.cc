// SPDX-License-Identifier: Apache-2.0
#include "kernels/bf16_product.h"

#include "kernels/kernels.h"

namespace lode {

#if defined(__x86_64__)
extern const Bf16ProductKernels kAmxBf16Products;
#endif

const Bf16ProductKernels* bf16_product_kernels() {
#if defined(__x86_64__)
  if (kernels().name == "amx") return &kAmxBf16Products;
#endif
  return nullptr;
}

}  // namespace lode
