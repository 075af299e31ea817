// SPDX-License-Identifier: Apache-2.0
// Products of many rows in bf16 on tiles of the matrix unit. Included after simd/codes_avx512.h, simd/bf16_avx512.h,
// simd/transpose_avx512.h and simd/amx_tiles.h.
//
// The unit multiplies a tile of 16 rows x 32 columns of x with a tile that holds pairs of columns side by side for 16
// rows of the weight. A tile of quantised weights (kernels/tiled_weight.h) has its rows in lanes already, so that
// codes become such pairs without a transposition.
#pragma once

#include <cstring>

#include "kernels/bf16_product.h"
#include "kernels/cpu/tile_codes-inl.h"

namespace lode {
namespace {

constexpr std::int64_t kPairRow = 2 * kBf16TileRows;  // numbers of one pair of columns in a tile

LODE_INLINE std::int64_t tiles_over(std::int64_t cols) {
  return (cols + kBf16TileColumns - 1) / kBf16TileColumns;
}

void pack_input_tiles(const float* const* x, int rows, std::int64_t cols, std::uint16_t* to) noexcept {
  const std::int64_t tiles = tiles_over(cols);
  if (rows < kBf16TileRows) std::memset(to, 0, static_cast<std::size_t>(tiles * kBf16TileNumbers * 2));
  for (int r = 0; r < rows; ++r) {
    const float* const row = x[r];
    for (std::int64_t t = 0; t < tiles; ++t) {
      const auto left = static_cast<int>(cols - t * kBf16TileColumns);
      const Vec low = load_first(row + t * kBf16TileColumns, left < 16 ? left : 16);
      const Vec high =
          left > 16 ? load_first(row + t * kBf16TileColumns + 16, left < 32 ? left - 16 : 16) : set1(0.0f);
      _mm512_store_si512(to + t * kBf16TileNumbers + r * kBf16TileColumns, join_bf16(low, high));
    }
  }
}

void pack_weight_tiles(const std::uint16_t* w, std::int64_t stride, int rows, std::int64_t cols,
                       std::uint16_t* to) noexcept {
  for (std::int64_t t = 0; t < tiles_over(cols); ++t, to += kBf16TileNumbers) {
    const std::int64_t column = t * kBf16TileColumns;
    const __mmask32 columns = cols - column < kBf16TileColumns ? (1u << (cols - column)) - 1u : ~0u;
    __m512i pairs[kBf16TileRows];
    for (int r = 0; r < kBf16TileRows; ++r)
      pairs[r] = _mm512_maskz_loadu_epi16(r < rows ? columns : 0u, w + r * stride + column);
    transpose(pairs);
    for (int p = 0; p < kBf16TileRows; ++p) _mm512_store_si512(to + p * kPairRow, pairs[p]);
  }
}

/// Column C of the four that lie in each lane.
template <int C>
LODE_INLINE Vec column_of(Codes codes) {
  const __m512i moved = _mm512_srli_epi32(codes.x, 8 * C);
  return {_mm512_cvtepi32_ps(C == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi32(0xff)))};
}

template <WeightType T>
void unpack_tile(const std::byte* tile, std::int64_t first, std::int64_t cols, std::uint16_t* to) noexcept {
  constexpr TileLayout kLayout{tile_format(T)};
  constexpr TileFormat kFormat = kLayout.format;
  constexpr int kGroups = 32 / kFormat.group, kSteps = 8 / kGroups;
  const Table table = code_table<T>();
  const Vec minus_offset =
      set1(kFormat.offset_shift < 0 ? 0.0f : -static_cast<float>(1 << (kFormat.offset_shift & 7)));
  const std::byte* unit = tile + first / kLayout.unit_columns() * kLayout.unit_bytes();
  for (std::int64_t column = 0; column < cols;
       column += kLayout.unit_columns(), unit += kLayout.unit_bytes()) {
    std::uint16_t* const pairs = to + column / kBf16TileColumns * kBf16TileNumbers;
    for_blocks<T>(unit, 0, [&](int b, const std::byte* planes, auto group) LODE_INLINE_LAMBDA {
      unroll<kGroups>([&](auto g) LODE_INLINE_LAMBDA {
        const GroupScale s = group(g);
        const Vec base = kFormat.offset_shift < 0 ? s.minimum : fma(minus_offset, s.scale, s.minimum);
        unroll<kSteps>([&](auto i) LODE_INLINE_LAMBDA {
          constexpr int kStep = decltype(g){} * kSteps + decltype(i){};
          Codes codes = codes_of_step<T, kStep>(planes);
          if constexpr (kHasTable<T>) codes = look_up(table, codes);
          std::uint16_t* const at = pairs + b * kBf16TileNumbers + 2 * kStep * kPairRow;
          const Vec w0 = fma(column_of<0>(codes), s.scale, base),
                    w1 = fma(column_of<1>(codes), s.scale, base);
          _mm512_store_si512(at, pair_bf16(w0, w1));
          const Vec w2 = fma(column_of<2>(codes), s.scale, base),
                    w3 = fma(column_of<3>(codes), s.scale, base);
          _mm512_store_si512(at + kPairRow, pair_bf16(w2, w3));
        });
      });
    });
  }
}

/// c [32, 32] (+)= two strips of x times two strips of w. What all three point to has been settled in memory
/// (Tiles does).
LODE_INLINE void multiply_block(const std::uint16_t* x, std::int64_t x_strip, const std::uint16_t* w,
                                std::int64_t w_strip, std::int64_t steps, bool add, float* c) {
  constexpr std::int64_t kRow = kBf16BlockRows * sizeof(float);
  float* const low = c + kBf16TileRows * kBf16BlockRows;
  if (add) {
    _tile_loadd(0, c, kRow);
    _tile_loadd(1, c + kBf16TileRows, kRow);
    _tile_loadd(2, low, kRow);
    _tile_loadd(3, low + kBf16TileRows, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t i = 0; i < steps; ++i, x += kBf16TileNumbers, w += kBf16TileNumbers) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + w_strip, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + x_strip, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kRow);
  _tile_stored(1, c + kBf16TileRows, kRow);
  _tile_stored(2, low, kRow);
  _tile_stored(3, low + kBf16TileRows, kRow);
}

/// A block of w stays in the first-level cache while the blocks of x pass it.
void multiply_panels(const Bf16Panel& x, const Bf16Panel& w, bool add, float* c) noexcept {
  const Tiles tiles(kWholeTiles);
  for (std::int64_t i = 0; i < w.blocks; ++i)
    for (std::int64_t j = 0; j < x.blocks; ++j, c += kBf16BlockRows * kBf16BlockRows)
      multiply_block(x.tiles + 2 * j * x.strip, x.strip, w.tiles + 2 * i * w.strip, w.strip, x.steps, add, c);
  settle_memory();
}

}  // namespace
}  // namespace lode
