// SPDX-License-Identifier: Apache-2.0
// GGUF's blocks to float32. A block is: f16 scales, packed small scales, packed numbers; the order differs by
// type and is written beside each. Products and sums are in the order of GGUF's reference reader, so that the
// bits are the same; the build forbids fused multiply-adds here.
#include "kernels/dequantise.h"

#include <array>
#include <bit>
#include <cstring>

#include "kernels/blocks/iq3_books.h"
#include "kernels/tiled_weight.h"

namespace lode {

namespace {

using Bytes = const std::uint8_t*;

constexpr int kSuper = 256;  // numbers of a block of types with two levels of scales

float half_at(Bytes b) {
  std::uint16_t bits;
  std::memcpy(&bits, b, sizeof bits);
  return to_float(f16{bits});
}

std::uint32_t word_at(Bytes b) {
  std::uint32_t word;
  std::memcpy(&word, b, sizeof word);
  return word;
}

float as_float(int x) {
  return static_cast<float>(x);
}

/// d | 32 int8
void q8_0(Bytes b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) y[i] = as_float(static_cast<std::int8_t>(b[2 + i])) * d;
}

/// d | 16 bytes: number i is the low half of byte i, number 16 + i the high half; 8 stands for 0
void q4_0(Bytes b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * as_float((b[2 + i] & 15) - 8);
    y[16 + i] = d * as_float((b[2 + i] >> 4) - 8);
  }
}

/// d, m | 16 bytes as above, from 0
void q4_1(Bytes b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * as_float(b[4 + i] & 15) + m;
    y[16 + i] = d * as_float(b[4 + i] >> 4) + m;
  }
}

/// Number i of 32 whose low four bits lie as above and whose fifth bits are those of a word.
int five_bits(std::uint32_t high, Bytes low, int i) {
  const int four = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
  return four | static_cast<int>((high >> i) & 1u) << 4;
}

/// d | 32 fifth bits | 16 bytes; 16 stands for 0
void q5_0(Bytes b, float* y) {
  const float d = half_at(b);
  const std::uint32_t high = word_at(b + 2);
  for (int i = 0; i < 32; ++i) y[i] = d * as_float(five_bits(high, b + 6, i) - 16);
}

/// d, m | 32 fifth bits | 16 bytes
void q5_1(Bytes b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  const std::uint32_t high = word_at(b + 4);
  for (int i = 0; i < 32; ++i) y[i] = d * as_float(five_bits(high, b + 8, i)) + m;
}

/// 16 scales: four bits of scale, four of minimum | 64 bytes of two bits | d, dmin
void q2_k(Bytes b, float* y) {
  const Bytes scales = b, quants = b + 16;
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int i = 0; i < kSuper; ++i) {
    const int q = (quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
    const float scale = d * as_float(scales[i / 16] & 15), minimum = dmin * as_float(scales[i / 16] >> 4);
    y[i] = scale * as_float(q) - minimum;
  }
}

/// 32 bytes of third bits (set: nothing is taken off) | 64 bytes of two bits | 16 scales of six bits | d
void q3_k(Bytes b, float* y) {
  const Bytes third = b, quants = b + 32, packed = b + 96;
  const float d = half_at(b + 108);
  std::array<float, 16> scales;
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
    const int high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
    scales[static_cast<std::size_t>(i)] = d * as_float((low | high << 4) - 32);
  }
  for (int i = 0; i < kSuper; ++i) {
    const int low = (quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
    const int off = (third[i % 32] >> (i / 32)) & 1 ? 0 : 4;
    y[i] = scales[static_cast<std::size_t>(i / 16)] * as_float(low - off);
  }
}

/// Scale and minimum of eight groups, six bits each, in 12 bytes.
struct GroupScales {
  std::array<float, 8> scale, minimum;
  GroupScales(Bytes packed, float d, float dmin) {
    for (int i = 0; i < 8; ++i) {
      const int j = i % 4;
      const int s = i < 4 ? packed[j] & 63 : (packed[8 + j] & 15) | (packed[j] >> 6) << 4;
      const int m = i < 4 ? packed[4 + j] & 63 : packed[8 + j] >> 4 | (packed[4 + j] >> 6) << 4;
      scale[static_cast<std::size_t>(i)] = d * as_float(s);
      minimum[static_cast<std::size_t>(i)] = dmin * as_float(m);
    }
  }
};

/// d, dmin | 12 bytes of scales | 128 bytes: 32 bytes hold two groups of 32, low halves first
void q4_k(Bytes b, float* y) {
  const GroupScales groups(b + 4, half_at(b), half_at(b + 2));
  for (int i = 0; i < kSuper; ++i) {
    const auto group = static_cast<std::size_t>(i / 32);
    const int q = (b[16 + i / 64 * 32 + i % 32] >> (group % 2 * 4)) & 15;
    y[i] = groups.scale[group] * as_float(q) - groups.minimum[group];
  }
}

/// d, dmin | 12 bytes of scales | 32 bytes of fifth bits, a bit per group | 128 bytes as above
void q5_k(Bytes b, float* y) {
  const GroupScales groups(b + 4, half_at(b), half_at(b + 2));
  for (int i = 0; i < kSuper; ++i) {
    const auto group = static_cast<std::size_t>(i / 32);
    const int low = (b[48 + i / 64 * 32 + i % 32] >> (group % 2 * 4)) & 15;
    const int high = (b[16 + i % 32] >> group) & 1;
    y[i] = groups.scale[group] * as_float(low | high << 4) - groups.minimum[group];
  }
}

/// 128 bytes of four bits | 64 bytes of two more | 16 int8 scales | d; 32 stands for 0
void q6_k(Bytes b, float* y) {
  const float d = half_at(b + 208);
  for (int i = 0; i < kSuper; ++i) {
    const int half = i / 128, in_half = i % 128;
    const int low = (b[half * 64 + in_half % 64] >> (in_half / 64 * 4)) & 15;
    const int high = (b[128 + half * 32 + in_half % 32] >> (in_half / 32 * 2)) & 3;
    const float scale = d * as_float(static_cast<std::int8_t>(b[192 + i / 16]));
    y[i] = scale * as_float((low | high << 4) - 32);
  }
}

void nonlinear(const std::int8_t (&values)[16], float scale, Bytes quants, float* y) {
  for (int i = 0; i < 16; ++i) {
    y[i] = scale * as_float(values[quants[i] & 15]);
    y[16 + i] = scale * as_float(values[quants[i] >> 4]);
  }
}

/// d | 16 bytes
void iq4_nl(Bytes b, float* y) {
  nonlinear(kNonlinear4, half_at(b), b + 2, y);
}

/// d | eight times two high bits of scale | four bytes of low bits | 128 bytes
void iq4_xs(Bytes b, float* y) {
  const float d = half_at(b);
  const int high = b[2] | b[3] << 8;
  for (int i = 0; i < 8; ++i) {
    const int scale = ((b[4 + i / 2] >> (i % 2 * 4)) & 15) | ((high >> (2 * i)) & 3) << 4;
    nonlinear(kNonlinear4, d * as_float(scale - 32), b + 8 + 16 * i, y + 32 * i);
  }
}

/// Four magnitudes of a code book's entry.
void from_book(std::uint16_t entry, const std::array<std::uint8_t, 8>& steps, int signs, float scale,
               float* y) {
  for (int i = 0; i < 4; ++i) {
    const float value = scale * as_float(steps[static_cast<std::size_t>((entry >> (3 * i)) & 7)]);
    y[i] = (signs >> i) & 1 ? -value : value;
  }
}

/// d | 64 entries' low bytes | 8 bytes of their ninth bits | 32 bytes of signs | 4 bytes of scales
void iq3_s(Bytes b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 64; ++i) {
    const int entry = b[2 + i] | ((b[66 + i / 8] >> (i % 8)) & 1) << 8;
    const int scale = (b[106 + i / 16] >> (i / 8 % 2 * 4)) & 15;
    from_book(kIq3SBook[entry], kIq3SSteps, b[74 + i / 2] >> (i % 2 * 4), d * as_float(1 + 2 * scale),
              y + 4 * i);
  }
}

/// d | 64 entries | 8 words: four times seven signs, the eighth makes their number even; four bits of scale
void iq3_xxs(Bytes b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t word = word_at(b + 66 + i / 8 * 4);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
    const std::uint32_t seven = (word >> (i % 8 / 2 * 7)) & 127u;
    const auto signs = static_cast<int>(seven | (static_cast<unsigned>(std::popcount(seven)) & 1u) << 7);
    from_book(kIq3XxsBook[b[2 + i]], kIq3XxsSteps, signs >> (i % 2 * 4), scale, y + 4 * i);
  }
}

/// Exponent | 16 bytes of four-bit floats
void mxfp4(Bytes b, float* y) {
  const std::uint32_t e = b[0];  // half of 2^(e - 127): the values are doubled
  nonlinear(kMicroFloat4, std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23), b + 1, y);
}

template <void (*block)(Bytes, float*)>
void blocks(WeightType type, Bytes from, std::int64_t n, float* to) {
  const WeightLayout& layout = layout_of(type);
  for (std::int64_t i = 0; i < n; i += layout.block, from += layout.block_bytes) block(from, to + i);
}

}  // namespace

std::array<int, 2> scale_places(WeightType type) {
  switch (type) {
    case WeightType::q4_1:
    case WeightType::q5_1:
    case WeightType::q4_k:
    case WeightType::q5_k:
      return {0, 2};
    case WeightType::q2_k:
      return {80, 82};
    case WeightType::q3_k:
      return {108, -1};
    case WeightType::q6_k:
      return {208, -1};
    case WeightType::mxfp4:
      return {-1, -1};
    default:
      return {0, -1};
  }
}

bool blocks_finite(WeightType type, const std::byte* data, std::int64_t n) noexcept {
  constexpr int kExponent = 0x7c;
  const WeightLayout& layout = layout_of(type);
  for (const int place : scale_places(type)) {
    if (place < 0) continue;
    const auto* high = reinterpret_cast<Bytes>(data) + place + 1;
    bool bad = false;
    for (std::int64_t i = 0; i < n / layout.block; ++i)
      bad |= (high[i * layout.block_bytes] & kExponent) == kExponent;
    if (bad) return false;
  }
  return true;
}

void dequantise(WeightType type, const std::byte* data, std::int64_t n, float* to) noexcept {
  const auto* from = reinterpret_cast<Bytes>(data);
  switch (type) {
    case WeightType::f32:
      std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
      return;
    case WeightType::f16:
      for (std::int64_t i = 0; i < n; ++i) to[i] = half_at(from + 2 * i);
      return;
    case WeightType::bf16:
      for (std::int64_t i = 0; i < n; ++i)
        to[i] = to_float(bf16{static_cast<std::uint16_t>(from[2 * i] | from[2 * i + 1] << 8)});
      return;
    case WeightType::q8_0:
      return blocks<q8_0>(type, from, n, to);
    case WeightType::q4_0:
      return blocks<q4_0>(type, from, n, to);
    case WeightType::q4_1:
      return blocks<q4_1>(type, from, n, to);
    case WeightType::q5_0:
      return blocks<q5_0>(type, from, n, to);
    case WeightType::q5_1:
      return blocks<q5_1>(type, from, n, to);
    case WeightType::q2_k:
      return blocks<q2_k>(type, from, n, to);
    case WeightType::q3_k:
      return blocks<q3_k>(type, from, n, to);
    case WeightType::q4_k:
      return blocks<q4_k>(type, from, n, to);
    case WeightType::q5_k:
      return blocks<q5_k>(type, from, n, to);
    case WeightType::q6_k:
      return blocks<q6_k>(type, from, n, to);
    case WeightType::iq4_nl:
      return blocks<iq4_nl>(type, from, n, to);
    case WeightType::iq4_xs:
      return blocks<iq4_xs>(type, from, n, to);
    case WeightType::iq3_s:
      return blocks<iq3_s>(type, from, n, to);
    case WeightType::iq3_xxs:
      return blocks<iq3_xxs>(type, from, n, to);
    case WeightType::mxfp4:
      return blocks<mxfp4>(type, from, n, to);
  }
}

}  // namespace lode
