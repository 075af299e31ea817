// SPDX-License-Identifier: Apache-2.0
// Products of many rows of activations with weights on the matrix unit, both rounded to bf16 (relative error of a number
// at most 2^-8), with float32 sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_pages.h"
#include "kernels/bf16_product.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// A weight, in tiles or plain, and where its products with y.rows rows of the input go.
struct Bf16Product {
  const TiledWeight* tiles = nullptr;
  const std::uint16_t* plain = nullptr;  ///< [y.cols, x.cols] of bf16, where there are no tiles
  Matrix<float> y;                       ///< [rows of the input, rows of the weight]
  std::int64_t first = 0;  ///< of the rows of the input, of an order's places where there is one
};

/// What products are made in; kept from call to call.
struct Bf16Scratch {
  struct Worker {
    HugeVector<std::uint16_t> weights;
    HugeVector<float> sums;
  };
  HugeVector<std::uint16_t> input;
  std::vector<Worker> workers;
};

/// y = x w^T for each of `products`, which share their input: the rows of x that `order` names, or x where there is none.
/// Only where bf16_product_kernels() are. A row of y has the same bits however many rows and threads there are.
void matmul_bf16(Matrix<const float> x, std::span<const Bf16Product> products, Bf16Scratch& scratch,
                 ThreadPool& pool, std::span<const std::int64_t> order = {});

}  // namespace lode
