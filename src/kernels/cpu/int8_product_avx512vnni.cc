// SPDX-License-Identifier: Apache-2.0
// The 8-bit products for AVX-512 with VNNI.
#include "kernels/cpu/int8_product_avx512-inl.h"

namespace lode {
extern const Int8ProductKernels kAvx512VnniInt8Products;
constinit const Int8ProductKernels kAvx512VnniInt8Products = {"avx512vnni", encode, products_by<Piece>};
}  // namespace lode
