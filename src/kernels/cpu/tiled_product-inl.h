// SPDX-License-Identifier: Apache-2.0
// Activations in two parts of int8 times tiles of block-quantised weights, for whichever codes_*.h was included before. A
// lane is a row of the tile: 32 columns are eight steps of four, whose products add up in whole numbers; then one
// multiplication by the group's scale and one by the activations'. Every row of x has chains of sums of its own,
// in the order of the columns, so that its results do not depend on the others.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/tile_codes-inl.h"
#include "kernels/tiled_product.h"

namespace lode {
namespace {

constexpr float kLeastBlockScale = 1e-33f;  // its inverse is a float

void quantise_row(const float* x, std::int64_t row, RoundedRows& to) noexcept {
  const std::int64_t blocks = to.cols / kTileColumns32;
  for (std::int64_t b = 0; b < blocks; ++b, x += kTileColumns32) {
    const std::int64_t at = row * blocks + b;
    std::int8_t* const high = to.high.data() + at * kTileColumns32;
    std::int8_t* const low = to.low.data() + at * kTileColumns32;
    // Without their signs, numbers are in the order of their bits, infinity and NaN above all others.
    std::int32_t peak_bits = 0;
    for (int i = 0; i < kTileColumns32; ++i) {
      const std::int32_t magnitude = std::bit_cast<std::int32_t>(x[i]) & 0x7fffffff;
      peak_bits = magnitude > peak_bits ? magnitude : peak_bits;
    }
    const float peak = std::bit_cast<float>(peak_bits);
    float scale = peak / static_cast<float>(kMostInt16);
    const bool usable = scale >= kLeastBlockScale && !std::isinf(peak);
    const float inverse = usable ? 1.0f / scale : 0.0f;
    if (!usable) scale = scale < kLeastBlockScale ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    // A float of 1.5 * 2^23 and more has no fraction: adding it rounds, and leaves the whole number in the low
    // bits.
    constexpr float kRound = 12582912.0f;
    // In arrays of its own: bytes of `to` could lie anywhere, in x too, and the compiler would take number by number.
    std::int32_t codes[kTileColumns32];
    for (int i = 0; i < kTileColumns32; ++i) {
      const float scaled = usable ? x[i] * inverse : 0.0f;
      codes[i] = std::bit_cast<std::int32_t>(scaled + kRound) - std::bit_cast<std::int32_t>(kRound);
    }
    std::int8_t upper[kTileColumns32], lower[kTileColumns32];
    for (int i = 0; i < kTileColumns32; ++i) {
      const std::int32_t most = (codes[i] + 128) >> 8;
      upper[i] = static_cast<std::int8_t>(most);
      lower[i] = static_cast<std::int8_t>(codes[i] - 256 * most);
    }
    std::memcpy(high, upper, sizeof upper);
    std::memcpy(low, lower, sizeof lower);
    std::int32_t sums[2] = {0, 0};
    for (int h = 0; h < 2; ++h)
      for (int i = 0; i < 16; ++i) sums[h] += codes[16 * h + i];
    to.scales[static_cast<std::size_t>(at)] = scale;
    for (int h = 0; h < 2; ++h) {
      to.minus16[static_cast<std::size_t>(2 * at + h)] = -sums[h];
      to.sums16[static_cast<std::size_t>(2 * at + h)] = scale * static_cast<float>(sums[h]);
    }
    to.minus32[static_cast<std::size_t>(at)] = -(sums[0] + sums[1]);
    to.sums32[static_cast<std::size_t>(at)] = scale * static_cast<float>(sums[0] + sums[1]);
  }
}

/// What M rows of x have at hand.
template <int M>
struct Activations {
  const std::int8_t *high, *low;
  const float* scales;
  const std::int32_t *minus16, *minus32;
  const float *sums16, *sums32;
  std::int64_t cols;

  Activations(const RoundedRows& x, std::int64_t row)
      : high(x.high.data() + row * x.cols),
        low(x.low.data() + row * x.cols),
        scales(x.scales.data() + row * (x.cols / 32)),
        minus16(x.minus16.data() + row * (x.cols / 16)),
        minus32(x.minus32.data() + row * (x.cols / 32)),
        sums16(x.sums16.data() + row * (x.cols / 16)),
        sums32(x.sums32.data() + row * (x.cols / 32)),
        cols(x.cols) {}
  LODE_INLINE const std::int8_t* high_at(int m, std::int64_t column) const {
    return high + m * cols + column;
  }
  LODE_INLINE const std::int8_t* low_at(int m, std::int64_t column) const { return low + m * cols + column; }
  LODE_INLINE float scale_at(int m, std::int64_t block) const { return scales[m * (cols / 32) + block]; }
  template <int kGroup>
  LODE_INLINE const std::int32_t* minus_at(int m, std::int64_t group) const {
    return (kGroup == 16 ? minus16 : minus32) + m * (cols / kGroup) + group;
  }
  template <int kGroup>
  LODE_INLINE float sum_at(int m, std::int64_t group) const {
    return (kGroup == 16 ? sums16 : sums32)[m * (cols / kGroup) + group];
  }
};

/// Adds 32 columns' products to `acc`; group(g) gives the scales of group g of them.
template <WeightType T, int M, class Group>
LODE_INLINE void add_block(const Activations<M>& x, std::int64_t block, const std::byte* planes, Table table,
                           Group group, Vec (&acc)[M]) {
  constexpr TileFormat kFormat = tile_format(T);
  constexpr int kGroups = 32 / kFormat.group, kSteps = 8 / kGroups;
  unroll<kGroups>([&](auto g) LODE_INLINE_LAMBDA {
    Ints sums[M], upper[M];
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
      if constexpr (kFormat.offset_shift >= 0)
        sums[m] = same_ints<kFormat.offset_shift>(x.template minus_at<kFormat.group>(m, block * kGroups + g));
      else
        sums[m] = no_ints();
      upper[m] = no_ints();
    });
    unroll<kSteps>([&](auto i) LODE_INLINE_LAMBDA {
      constexpr int kStep = decltype(g){} * kSteps + decltype(i){};
      Codes codes = codes_of_step<T, kStep>(planes);
      if constexpr (kHasTable<T>) codes = look_up(table, codes);
      unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
        constexpr int kBits = kHasTable<T> ? 8 : kFormat.bits;
        sums[m] = add_products<kBits>(sums[m], codes, x.low_at(m, block * 32 + kStep * 4));
        upper[m] = add_products<kBits>(upper[m], codes, x.high_at(m, block * 32 + kStep * 4));
      });
    });
    const GroupScale s = group(g);
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
      acc[m] = fma(to_floats(with_upper(sums[m], upper[m])) * s.scale, set1(x.scale_at(m, block)), acc[m]);
      if constexpr (kFormat.minimum != TileFormat::Minimum::none)
        acc[m] = fma(s.minimum, set1(x.template sum_at<kFormat.group>(m, block * kGroups + g)), acc[m]);
    });
  });
}

/// One unit of a tile; `part` is the first of this register's rows.
template <WeightType T, int M>
LODE_INLINE void add_unit(const Activations<M>& x, std::int64_t block, const std::byte* unit, int part,
                          Table table, Vec (&acc)[M]) {
  for_blocks<T>(unit, part, [&](int b, const std::byte* planes, auto group) LODE_INLINE_LAMBDA {
    add_block<T, M>(x, block + b, planes, table, group, acc);
  });
}

template <WeightType T, int M>
LODE_NOINLINE void tile_times(const RoundedRows& rows, std::int64_t first, const std::byte* tile, int valid,
                              float* y, std::int64_t stride) {
  constexpr TileLayout kLayout{tile_format(T)};
  const Activations<M> x(rows, first);
  const Table table = code_table<T>();
  for (int part = 0; part < valid; part += kLaneRows) {
    Vec acc[M];
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA { acc[m] = set1(0.0f); });
    const std::byte* unit = tile;
    for (std::int64_t column = 0; column < rows.cols; column += kLayout.unit_columns()) {
      add_unit<T, M>(x, column / 32, unit, part, table, acc);
      unit += kLayout.unit_bytes();
    }
    const int some = valid - part < kLaneRows ? valid - part : kLaneRows;
    for (int m = 0; m < M; ++m) store_first(y + m * stride + part, acc[m], some);
  }
}

/// Rows of x that share one pass over a tile: as many as registers hold, of those that are left.
constexpr int kTogether = kLaneRows == 16 ? 8 : kLaneRows == 8 ? 2 : 1;
constexpr int together(std::int64_t left) {
  for (int some = kTogether; some > 1; some /= 2)
    if (left >= some) return some;
  return 1;
}

template <WeightType T>
void tiles_times(const RoundedRows& x, std::int64_t first, std::int64_t count, const std::byte* tiles,
                 std::int64_t rows, float* y, std::int64_t stride) noexcept {
  constexpr TileLayout kLayout{tile_format(T)};
  const std::int64_t bytes = kLayout.tile_bytes(x.cols);
  for (std::int64_t row = 0; row < rows; row += kTileRows16, tiles += bytes) {
    const int valid = static_cast<int>(rows - row < kTileRows16 ? rows - row : kTileRows16);
    for (std::int64_t m = 0; m < count;) {
      float* const to = y + m * stride + row;
      const std::int64_t left = count - m;
      const int some = together(left);
      if (some == 8) tile_times<T, kTogether>(x, first + m, tiles, valid, to, stride);
      if (some == 4) tile_times < T, kTogether<4 ? 1 : 4>(x, first + m, tiles, valid, to, stride);
      if (some == 2) tile_times < T, kTogether<2 ? 1 : 2>(x, first + m, tiles, valid, to, stride);
      if (some == 1) tile_times<T, 1>(x, first + m, tiles, valid, to, stride);
      m += some;
    }
  }
}

constexpr TiledProductKernels tiled_products(std::string_view name) {
  using enum WeightType;
  return {name,
          quantise_row,
          {nullptr, nullptr, nullptr, tiles_times<q8_0>, tiles_times<q4_0>, tiles_times<q4_1>,
           tiles_times<q5_0>, tiles_times<q5_1>, tiles_times<q2_k>, tiles_times<q3_k>, tiles_times<q4_k>,
           tiles_times<q5_k>, tiles_times<q6_k>, tiles_times<iq4_nl>, tiles_times<iq4_xs>, tiles_times<iq3_s>,
           tiles_times<iq3_xxs>, tiles_times<mxfp4>}};
}

}  // namespace
}  // namespace lode
