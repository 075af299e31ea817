// SPDX-License-Identifier: Apache-2.0
// The tiled products for plain C++.
#include "kernels/cpu/simd/codes_scalar.h"
//
#include "kernels/cpu/tiled_product-inl.h"

namespace lode {
extern const TiledProductKernels kScalarTiledProducts;
constinit const TiledProductKernels kScalarTiledProducts = tiled_products("scalar");
}  // namespace lode
