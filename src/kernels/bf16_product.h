// SPDX-License-Identifier: Apache-2.0
// Contracts of the kernels that multiply many rows of activations with weights on the matrix unit: both are rounded to
// bf16, sums are float32. Operands are packed into tiles of 16 rows x 32 columns, which many products then share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/tiled_weight.h"

namespace lode {

inline constexpr int kBf16TileRows = 16, kBf16TileColumns = 32;
inline constexpr std::int64_t kBf16TileNumbers = kBf16TileRows * kBf16TileColumns;
inline constexpr int kBf16BlockRows =
    2 * kBf16TileRows;  ///< rows of either operand that make a block of results

/// Blocks of rows, each two strips of 16, as tiles side by side.
struct Bf16Panel {
  const std::uint16_t* tiles;  ///< [2 blocks, strip]
  std::int64_t blocks;
  std::int64_t strip;  ///< numbers from a strip's beginning to the next one's
  std::int64_t steps;  ///< tiles of a strip that are multiplied
};

/// All are noexcept and allocate nothing. A result depends on its row of x and its row of the weight alone.
struct Bf16ProductKernels {
  /// Up to 16 rows of activations to tiles [ceil(cols / 32), 16, 32]; missing rows and columns are 0.
  void (*pack_input)(const float* const* x /*[rows]*/, int rows, std::int64_t cols,
                     std::uint16_t* to) noexcept;
  /// Up to 16 rows of a bf16 weight to tiles [ceil(cols / 32), 16 pairs of columns, 16 rows, 2]; missing ones are 0.
  void (*pack_weight)(const std::uint16_t* w, std::int64_t stride, int rows, std::int64_t cols,
                      std::uint16_t* to) noexcept;
  /// The same of columns [first, first + cols) of a tile of block-quantised weights, whole units.
  using Unpack = void (*)(const std::byte* tile, std::int64_t first, std::int64_t cols,
                          std::uint16_t* to) noexcept;
  std::array<Unpack, 18> unpack;  ///< by WeightType; null for plain types
  /// Block [i, j] of c, 64-byte aligned, becomes (add: grows by) the products of the 32 rows of block j of x with the 32
  /// rows of block i of w.
  void (*multiply)(const Bf16Panel& x, const Bf16Panel& w, bool add,
                   float* c /*[w.blocks, x.blocks, 32, 32]*/) noexcept;
};

/// Those that go with kernels(); null where they have no matrix unit.
const Bf16ProductKernels* bf16_product_kernels();

}  // namespace lode
