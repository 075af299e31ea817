// SPDX-License-Identifier: Apache-2.0
// Products of activations with block-quantised weights in tiles: activations are rounded to 16 bits, 32 numbers
// to a scale.
#pragma once

#include <span>

#include "kernels/tiled_product.h"
#include "kernels/tiled_weight.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// A weight and where its products with y.rows rows of the input go: y [rows, w.rows].
struct TiledProduct {
  const TiledWeight* w = nullptr;
  Matrix<float> y;
  std::int64_t first = 0;  ///< of the rows of the input
};

/// y = x w^T for each of `products`, which share their input: the rows of x that `order` names, or x where there is
/// none. Each row of x is rounded once, into `scratch`. A row of y has the same bits however many rows there are.
void matmul_tiled(Matrix<const float> x, std::span<const TiledProduct> products, RoundedRows& scratch,
                  ThreadPool& pool, std::span<const std::int64_t> order = {});

}  // namespace lode
