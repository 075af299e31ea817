// SPDX-License-Identifier: Apache-2.0
// The tiled products for AVX2.
#include "kernels/cpu/simd/codes_avx2.h"
//
#include "kernels/cpu/tiled_product-inl.h"

namespace lode {
extern const TiledProductKernels kAvx2TiledProducts;
constinit const TiledProductKernels kAvx2TiledProducts = tiled_products("avx2");
}  // namespace lode
