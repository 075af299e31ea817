// SPDX-License-Identifier: Apache-2.0
// The tiled products for AVX-512.
#include "kernels/cpu/simd/codes_avx512.h"
//
#include "kernels/cpu/tiled_product-inl.h"

namespace lode {
extern const TiledProductKernels kAvx512TiledProducts;
constinit const TiledProductKernels kAvx512TiledProducts = tiled_products("avx512");
}  // namespace lode
