// SPDX-License-Identifier: Apache-2.0
// Contracts of the kernels that multiply activations in two int8 parts with tiles of block-quantised weights. One table
// of functions per instruction set, chosen as kernels() is; AVX-512 comes with and without VNNI.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/tiled_weight.h"
#include "lodestone/types.h"

namespace lode {

/// Vectors in whole numbers of 16 bits, of two int8 each, with one scale for each 32; and what offsets and minima
/// of weights are multiplied with. Eight bits alone cost a small model 2.4 % of its logits; the products of a
/// second part are nearly free where few rows wait for memory.
struct RoundedRows {
  std::int64_t rows = 0, cols = 0;             // cols: a multiple of 32
  std::vector<std::int8_t> high, low;          // at least [rows, cols]; a code is 256 high + low
  std::vector<float> scales;                   // [rows, cols / 32]
  std::vector<std::int32_t> minus16, minus32;  // [rows, cols / 16 or 32] minus the sum of the codes
  std::vector<float> sums16, sums32;           // the same sums, times their scale, not negated
  /// Vectors grow alone: a step's inputs differ in size, and growing again would fill them with zeros each time.
  void resize(std::int64_t rows, std::int64_t cols);
  void copy_row(std::int64_t from, std::int64_t to);
};

inline constexpr int kMostInt16 = 127 * 256 + 127;

/// All are noexcept and allocate nothing. A result depends on its row of x and its row of the tile alone.
struct TiledProductKernels {
  std::string_view name;

  /// Codes row `row` of `to`: x[i] / s to the nearest whole number with s = max |x| / kMostInt16 of the 32; 0
  /// where s is 0 or below 1e-33. A number that is not finite makes its block's scale NaN.
  void (*quantise)(const float* x, std::int64_t row, RoundedRows& to) noexcept;
  /// y[m * stride + r] = x[first + m] . row r, for `rows` rows that begin at a tile and m < count.
  using Product = void (*)(const RoundedRows& x, std::int64_t first, std::int64_t count,
                           const std::byte* tiles, std::int64_t rows, float* y, std::int64_t stride) noexcept;
  std::array<Product, 18> products;  ///< by WeightType; null for plain types
};

/// The table that goes with kernels().
const TiledProductKernels& tiled_product_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const TiledProductKernels* const> supported_tiled_product_kernels();

}  // namespace lode
