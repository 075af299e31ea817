// SPDX-License-Identifier: Apache-2.0
// How registers read tiles of block-quantised weights (kernels/tiled_weight.h), for whichever codes_*.h was included
// before. A lane is a row of the tile.
#pragma once

#include <cstdint>

#include "kernels/tiled_weight.h"

namespace lode {
namespace {

/// Rows of a tile that one register holds, and where the register's part of a tile lies.
constexpr int kLaneRows = Vec::kLanes;
constexpr std::int64_t kTileAhead =
    4096;  // bytes; beyond the end of the page, where the machine by itself stops

/// Asks for the bytes that lie kTileAhead behind 32 columns, once for all registers' parts of them. A core has few
/// reads under way at a time (24 on Zen 4): to ask for the 37 lines of 256 columns at once made it wait.
LODE_INLINE void prefetch_behind(const std::byte* columns, int bytes, int part) {
  if (part == 0) prefetch(columns + kTileAhead, bytes);
}

/// The codes of step S (four columns) of 32; `planes` points to this register's rows.
template <WeightType T, int S>
LODE_INLINE Codes codes_of_step(const std::byte* planes) {
  constexpr int kBits = tile_format(T).bits;
  if constexpr (kBits == 8) return load_codes(planes + 64 * S);
  constexpr bool kFour = (kBits & 4) != 0, kTwo = (kBits & 2) != 0, kOne = (kBits & 1) != 0;
  const std::byte* const twos = planes + (kFour ? 256 : 0);
  const std::byte* const ones = twos + (kTwo ? 128 : 0);
  Codes codes;
  if constexpr (kFour) codes = bits_of<S % 2 * 4, 4, 0>(load_codes(planes + 64 * (S / 2)));
  if constexpr (kTwo && kFour) codes = with_bits_of<S % 4 * 2, 2, 4>(codes, load_codes(twos + 64 * (S / 4)));
  if constexpr (kTwo && !kFour) codes = bits_of<S % 4 * 2, 2, 0>(load_codes(twos + 64 * (S / 4)));
  if constexpr (kOne) codes = with_bits_of<S, 1, kBits - 1>(codes, load_codes(ones));
  return codes;
}

/// Whether the format has a table: GCC 12 takes no pointer's comparison for a constant where the sanitizer looks on.
template <WeightType T>
constexpr bool kHasTable = T == WeightType::iq4_nl || T == WeightType::iq4_xs || T == WeightType::mxfp4;

template <WeightType T>
LODE_INLINE Table code_table() {
  alignas(16) std::uint8_t entries[16] = {};
  constexpr TileFormat kFormat = tile_format(T);
#ifndef __SANITIZE_ADDRESS__
  static_assert(kHasTable<T> == (kFormat.table != nullptr));
#endif
  if constexpr (kHasTable<T>)
    for (int i = 0; i < 16; ++i)
      entries[i] = static_cast<std::uint8_t>(kFormat.table[i] + (1 << kFormat.offset_shift));
  return table_of(entries);
}

template <WeightType T>
LODE_INLINE Vec scale_of(const std::byte* p) {
  return tile_format(T).scale == TileFormat::Scale::brain ? load_as<DType::bf16>(p) : load_as<DType::f16>(p);
}

/// The scales and minima of one group of one register's rows.
struct GroupScale {
  Vec scale, minimum;
};

/// The blocks of 32 columns of one unit of a tile, in order: body(block, planes, group), where group(g) gives the
/// scales of group g of the block. `part` is the first of this register's rows.
template <WeightType T, class Body>
LODE_INLINE void for_blocks(const std::byte* unit, int part, Body body) {
  constexpr TileLayout kLayout{tile_format(T)};
  constexpr bool kMinimum = kLayout.has_minimum();
  const Vec scale = scale_of<T>(unit + 2 * part);
  const Vec minimum = kMinimum ? load_as<DType::f16>(unit + 2 * (kTileRows16 + part)) : set1(0.0f);
  const std::byte* at = unit + kLayout.head_bytes();
  constexpr int kBlockBytes = kLayout.scale_bytes() + kLayout.code_bytes();
  if constexpr (!kLayout.nested()) {
    prefetch_behind(unit, kLayout.unit_bytes(), part);
    body(0, at + 4 * part, [&](int) LODE_INLINE_LAMBDA { return GroupScale{scale, minimum}; });
  } else {
    const Vec d = scale * set1(kLayout.format.factor), minus = set1(0.0f) - minimum;
    for (int b = 0; b < 8; ++b, at += kBlockBytes) {
      prefetch_behind(at, kBlockBytes, part);
      const auto group = [&](int g) LODE_INLINE_LAMBDA {
        GroupScale s = {load_as<DType::q8>(at + kTileRows16 * g + part) * d, minus};
        if constexpr (kMinimum)
          s.minimum = load_as<DType::q8>(at + kTileRows16 * (kLayout.groups() + g) + part) * minus;
        return s;
      };
      body(b, at + kLayout.scale_bytes() + 4 * part, group);
    }
  }
}

}  // namespace
}  // namespace lode
