// SPDX-License-Identifier: Apache-2.0
// Takes GGUF's blocks apart (dequantise.cc says how they lie) and puts codes and scales into tiles.
#include "kernels/tiled_weight.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/threads.h"
#include "kernels/blocks/iq3_books.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Bytes = const std::uint8_t*;

/// A block's codes and scales, each in a number of its own.
struct Parts {
  std::array<std::uint8_t, 256> codes{};
  std::array<std::int8_t, 16> scales{}, minima{};  // of groups, where scales are nested
  std::uint16_t scale = 0, minimum = 0;            // f16 or bf16 bits
};

std::uint16_t half_bits(Bytes b) {
  return static_cast<std::uint16_t>(b[0] | b[1] << 8);
}

std::uint8_t byte_of(int x) {
  return static_cast<std::uint8_t>(x);
}

/// Nibbles: low halves, then high ones.
void take_nibbles(Bytes b, int bytes, std::uint8_t* codes) {
  for (int i = 0; i < bytes; ++i) {
    codes[i] = b[i] & 15;
    codes[bytes + i] = b[i] >> 4;
  }
}

void take_fifth_bits(Bytes b, std::uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = byte_of(codes[i] | ((b[i / 8] >> (i % 8)) & 1) << 4);
}

void take_q8_0(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  for (std::size_t i = 0; i < 32; ++i) p.codes[i] = b[2 + i] ^ 0x80;
}

/// Of q4_0, q4_1, q5_0, q5_1, iq4_nl.
template <bool kMinimum, bool kFive>
void take_small(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  if (kMinimum) p.minimum = half_bits(b + 2);
  Bytes rest = b + (kMinimum ? 4 : 2);
  take_nibbles(rest + (kFive ? 4 : 0), 16, p.codes.data());
  if (kFive) take_fifth_bits(rest, p.codes.data());
}

void take_mxfp4(Bytes b, Parts& p) {
  const std::uint32_t e = b[0];
  p.scale = static_cast<std::uint16_t>((e < 2 ? 0x00200000u << e : (e - 1) << 23) >> 16);
  take_nibbles(b + 1, 16, p.codes.data());
}

void take_q2_k(Bytes b, Parts& p) {
  p.scale = half_bits(b + 80);
  p.minimum = half_bits(b + 82);
  for (std::size_t i = 0; i < 16; ++i) {
    p.scales[i] = static_cast<std::int8_t>(b[i] & 15);
    p.minima[i] = static_cast<std::int8_t>(b[i] >> 4);
  }
  for (std::size_t i = 0; i < 256; ++i)
    p.codes[i] = (b[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
}

void take_q3_k(Bytes b, Parts& p) {
  p.scale = half_bits(b + 108);
  for (std::size_t i = 0; i < 16; ++i) {
    const int low = i < 8 ? b[96 + i] & 15 : b[96 + i - 8] >> 4;
    const int high = (b[104 + i % 4] >> (i / 4 * 2)) & 3;
    p.scales[i] = static_cast<std::int8_t>((low | high << 4) - 32);
  }
  for (std::size_t i = 0; i < 256; ++i) {
    const int low = (b[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
    p.codes[i] = byte_of(low | ((b[i % 32] >> (i / 32)) & 1) << 2);
  }
}

/// Of q4_k and q5_k: scales and minima of six bits.
void take_groups(Bytes packed, Parts& p) {
  for (std::size_t i = 0; i < 8; ++i) {
    const std::size_t j = i % 4;
    const int s = i < 4 ? packed[j] & 63 : (packed[8 + j] & 15) | (packed[j] >> 6) << 4;
    const int m = i < 4 ? packed[4 + j] & 63 : packed[8 + j] >> 4 | (packed[4 + j] >> 6) << 4;
    p.scales[i] = static_cast<std::int8_t>(s);
    p.minima[i] = static_cast<std::int8_t>(m);
  }
}

template <bool kFive>
void take_q45_k(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  p.minimum = half_bits(b + 2);
  take_groups(b + 4, p);
  for (int i = 0; i < 4; ++i) take_nibbles(b + (kFive ? 48 : 16) + 32 * i, 32, p.codes.data() + 64 * i);
  if (!kFive) return;
  for (std::size_t i = 0; i < 256; ++i)
    p.codes[i] = byte_of(p.codes[i] | ((b[16 + i % 32] >> (i / 32)) & 1) << 4);
}

void take_q6_k(Bytes b, Parts& p) {
  p.scale = half_bits(b + 208);
  std::memcpy(p.scales.data(), b + 192, 16);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t half = i / 128, in_half = i % 128;
    const int low = (b[half * 64 + in_half % 64] >> (in_half / 64 * 4)) & 15;
    const int high = (b[128 + half * 32 + in_half % 32] >> (in_half / 32 * 2)) & 3;
    p.codes[i] = byte_of(low | high << 4);
  }
}

void take_iq4_xs(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  const int high = b[2] | b[3] << 8;
  for (int i = 0; i < 8; ++i) {
    const int scale = ((b[4 + i / 2] >> (i % 2 * 4)) & 15) | ((high >> (2 * i)) & 3) << 4;
    p.scales[static_cast<std::size_t>(i)] = static_cast<std::int8_t>(scale - 32);
    take_nibbles(b + 8 + 16 * i, 16, p.codes.data() + 32 * i);
  }
}

/// Four magnitudes of a code book's entry with their signs.
void take_entry(std::uint16_t entry, const std::array<std::uint8_t, 8>& steps, int signs, int offset,
                std::uint8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    const int value = steps[static_cast<std::size_t>((entry >> (3 * i)) & 7)];
    codes[i] = byte_of(offset + ((signs >> i) & 1 ? -value : value));
  }
}

void take_iq3_s(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  for (int i = 0; i < 8; ++i)
    p.scales[static_cast<std::size_t>(i)] =
        static_cast<std::int8_t>(1 + 2 * ((b[106 + i / 2] >> (i % 2 * 4)) & 15));
  for (int i = 0; i < 64; ++i)
    take_entry(kIq3SBook[b[2 + i] | ((b[66 + i / 8] >> (i % 8)) & 1) << 8], kIq3SSteps,
               b[74 + i / 2] >> (i % 2 * 4), 16, p.codes.data() + 4 * i);
}

void take_iq3_xxs(Bytes b, Parts& p) {
  p.scale = half_bits(b);
  for (int i = 0; i < 64; ++i) {
    std::uint32_t word;
    std::memcpy(&word, b + 66 + i / 8 * 4, sizeof word);
    p.scales[static_cast<std::size_t>(i / 8)] = static_cast<std::int8_t>(1 + 2 * (word >> 28));
    const std::uint32_t seven = (word >> (i % 8 / 2 * 7)) & 127u;
    const auto signs = static_cast<int>(seven | (static_cast<unsigned>(std::popcount(seven)) & 1u) << 7);
    take_entry(kIq3XxsBook[b[2 + i]], kIq3XxsSteps, signs >> (i % 2 * 4), 64, p.codes.data() + 4 * i);
  }
}

using Take = void (*)(Bytes, Parts&);

Take take_of(WeightType type) {
  switch (type) {
    case WeightType::q8_0:
      return take_q8_0;
    case WeightType::q4_0:
    case WeightType::iq4_nl:
      return take_small<false, false>;
    case WeightType::q4_1:
      return take_small<true, false>;
    case WeightType::q5_0:
      return take_small<false, true>;
    case WeightType::q5_1:
      return take_small<true, true>;
    case WeightType::q2_k:
      return take_q2_k;
    case WeightType::q3_k:
      return take_q3_k;
    case WeightType::q4_k:
      return take_q45_k<false>;
    case WeightType::q5_k:
      return take_q45_k<true>;
    case WeightType::q6_k:
      return take_q6_k;
    case WeightType::iq4_xs:
      return take_iq4_xs;
    case WeightType::iq3_s:
      return take_iq3_s;
    case WeightType::iq3_xxs:
      return take_iq3_xxs;
    case WeightType::mxfp4:
      return take_mxfp4;
    default:
      return nullptr;
  }
}

/// Adds one row's 32 codes to the planes of its tile, which were 0: four columns at a time, for they lie side by side
/// there too. A shift takes no bit from one code to the next, since each plane keeps bits of the code alone.
void put_codes(const TileFormat& format, int row, const std::uint8_t* codes, std::uint8_t* planes) {
  const bool eight = format.bits == 8, four = !eight && (format.bits & 4) != 0,
             two = !eight && (format.bits & 2) != 0, one = !eight && (format.bits & 1) != 0;
  std::uint8_t* const twos = planes + (four ? 256 : 0);
  std::uint8_t* const ones = twos + (two ? 128 : 0);
  const auto put = [row](std::uint8_t* line, std::uint32_t bits) {
    std::uint32_t there;
    std::memcpy(&there, line + 4 * row, sizeof there);
    there |= bits;
    std::memcpy(line + 4 * row, &there, sizeof there);
  };
  for (int s = 0; s < kTileColumns32 / 4; ++s) {
    std::uint32_t some;
    std::memcpy(&some, codes + 4 * s, sizeof some);
    if (eight) put(planes + 64 * s, some);
    if (four) put(planes + 64 * (s / 2), (some & 0x0f0f0f0f) << (s % 2 * 4)), some >>= 4;
    if (two) put(twos + 64 * (s / 4), (some & 0x03030303) << (s % 4 * 2)), some >>= 2;
    if (one) put(ones, (some & 0x01010101) << s);
  }
}

/// One row's part of a unit.
void put_parts(const TileLayout& layout, int row, const Parts& p, std::uint8_t* unit) {
  std::memcpy(unit + 2 * row, &p.scale, 2);
  if (layout.has_minimum()) std::memcpy(unit + 2 * kTileRows16 + 2 * row, &p.minimum, 2);
  std::uint8_t* at = unit + layout.head_bytes();
  for (int column = 0; column < layout.unit_columns(); column += kTileColumns32) {
    const int groups = layout.groups(), first = column / layout.format.group;
    for (int g = 0; layout.nested() && g < groups; ++g) {
      at[kTileRows16 * g + row] = static_cast<std::uint8_t>(p.scales[static_cast<std::size_t>(first + g)]);
      if (layout.has_minimum())
        at[kTileRows16 * (groups + g) + row] =
            static_cast<std::uint8_t>(p.minima[static_cast<std::size_t>(first + g)]);
    }
    put_codes(layout.format, row, p.codes.data() + column, at + layout.scale_bytes());
    at += layout.scale_bytes() + layout.code_bytes();
  }
}

}  // namespace

TiledWeight tile_weight(WeightType type, const std::byte* blocks, std::int64_t rows, std::int64_t cols,
                        HugeArena& arena, ThreadPool& pool) {
  const WeightLayout& stored = layout_of(type);
  const TileLayout layout{tile_format(type)};
  const Take take = take_of(type);
  LODE_ASSERT(take != nullptr && layout.unit_columns() == stored.block && cols % stored.block == 0);
  const std::int64_t tiles = (rows + kTileRows16 - 1) / kTileRows16, bytes = layout.tile_bytes(cols);
  const std::span<std::byte> to = arena.take(static_cast<std::size_t>(tiles * bytes));
  const ThreadPool::Awaited awaited;  // by all who need this weight
  pool.for_each(tiles, [&](std::int64_t tile, int) {
    auto* const at = reinterpret_cast<std::uint8_t*>(to.data() + tile * bytes);
    const std::int64_t some = std::min<std::int64_t>(kTileRows16, rows - tile * kTileRows16);
    for (int row = 0; row < some; ++row) {
      const auto* from = reinterpret_cast<Bytes>(blocks) + bytes_of(type, (tile * kTileRows16 + row) * cols);
      for (std::int64_t unit = 0; unit < cols / stored.block; ++unit, from += stored.block_bytes) {
        Parts parts;
        take(from, parts);
        put_parts(layout, row, parts, at + unit * layout.unit_bytes());
      }
    }
  });
  return {type, rows, cols, to};
}

}  // namespace lode
