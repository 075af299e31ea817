// SPDX-License-Identifier: Apache-2.0
// What lies where in a tile of 8 rows x 256 columns, and how a lane gets bytes for the matrix unit from it.
//
// Lane 4 g + t of a warp owns row g and two blocks of 32 columns: block t (part 0) and block 4 + t (part 1). One
// product of the matrix unit takes 32 columns, 8 of each lane's: so four blocks meet in one product, and its
// input has each block's columns in other columns of the result (tile_stream.cuh). Product i of a part has
// columns 8 i to 8 i + 7 of the block; its words 0 and 1 hold four of these each, one a byte.
//
//   codes of 4 bits   [2: i / 2][32 lanes][4 words: i % 2, word]: part 0 in the low nibble, part 1 in the high
//   codes of 8 bits   [4: part, i / 2][32 lanes][4 words: i % 2, word]
//   the fifth bit     [32 lanes][2 words: i / 2]: bit 2 (2 (i % 2) + word) + part of each byte
//   bits 5 and 6      [32 lanes][4 words: i]: bits 2 (2 word + part) and above of each byte
//   scales            [8 rows][4 lanes] first, as each codec says
//   MXFP4's codes     as those of 4 bits, but part 0 has the low half of a word and part 1 the high half
//
// Codes of formats whose values are code - 2^(bits - 1) are stored in two's complement. A codec shifts codes to
// where extracting is cheapest, so bytes are `factor` times the code.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/linear/tiles.h"

namespace lode::cuda {

inline constexpr int kCodeBytes4 = kTileRows * kTileColumns / 2;  // of a tile's codes of 4 bits

/// Byte i of a word as a float32 of 2^23 more.
__device__ __forceinline__ float byte_above_2_23(unsigned word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u | static_cast<unsigned>(i)));
}
/// One of two f16.
__device__ __forceinline__ float half_of(unsigned both, int i) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(both >> 16 * i)));
}

/// Codes of 4 bits, two's complement or from 0 to 15. `load` takes those of products 2 u and 2 u + 1.
template <bool Signed>
struct Codes4 {
  static constexpr bool kSigned = Signed, kHalves = false;
  static constexpr int kBytes = kCodeBytes4, kBits = 4, kBias = 0;  // kBias: that bytes are more than codes
  uint4 low;
  __device__ __forceinline__ void load(const char* tile, int lane, int u) {
    low = *reinterpret_cast<const uint4*>(tile + u * 512 + lane * 16);
  }
  __device__ __forceinline__ unsigned low_word(int i, int word) const {
    const unsigned words[4] = {low.x, low.y, low.z, low.w};
    return words[2 * i + word];
  }
  static constexpr int factor(int part) { return Signed || part == 1 ? 16 : 1; }
  /// Four bytes of product 2 u + i.
  __device__ __forceinline__ unsigned bytes(int i, int part, int word) const {
    const unsigned w = low_word(i, word);
    if (part == 1) return w & 0xf0f0f0f0u;
    return Signed ? w << 4 & 0xf0f0f0f0u : w & 0x0f0f0f0fu;
  }
};

template <bool Signed>
struct Codes5 : Codes4<Signed> {
  static constexpr int kBytes = kCodeBytes4 + kTileRows * kTileColumns / 8, kBits = 5;
  unsigned high;
  __device__ __forceinline__ void load(const char* tile, int lane, int u) {
    Codes4<Signed>::load(tile, lane, u);
    high = *reinterpret_cast<const unsigned*>(tile + kCodeBytes4 + lane * 8 + u * 4);
  }
  static constexpr int factor(int) { return 8; }
  __device__ __forceinline__ unsigned bytes(int i, int part, int word) const {
    const unsigned w = this->low_word(i, word);
    const int bit = 2 * (2 * i + word) + part;
    return ((part == 0 ? w << 3 : w >> 1) & 0x78787878u) | (high << (7 - bit) & 0x80808080u);
  }
};

struct Codes6 : Codes4<true> {
  static constexpr int kBytes = kCodeBytes4 + kTileRows * kTileColumns / 4, kBits = 6;
  uint2 high;
  __device__ __forceinline__ void load(const char* tile, int lane, int u) {
    Codes4<true>::load(tile, lane, u);
    high = *reinterpret_cast<const uint2*>(tile + kCodeBytes4 + lane * 16 + u * 8);
  }
  static constexpr int factor(int) { return 4; }
  __device__ __forceinline__ unsigned bytes(int i, int part, int word) const {
    const unsigned w = low_word(i, word), h = i == 0 ? high.x : high.y;
    return ((part == 0 ? w << 2 : w >> 2) & 0x3c3c3c3cu) | (h << (6 - 2 * (2 * word + part)) & 0xc0c0c0c0u);
  }
};

struct Codes8 {
  static constexpr bool kSigned = true, kHalves = false;
  static constexpr int kBytes = kTileRows * kTileColumns, kBits = 8, kBias = 0;
  uint4 raw[2];
  __device__ __forceinline__ void load(const char* tile, int lane, int u) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      raw[part] = *reinterpret_cast<const uint4*>(tile + (2 * part + u) * 512 + lane * 16);
  }
  static constexpr int factor(int) {
    return 1;
  }
  __device__ __forceinline__ unsigned bytes(int i, int part, int word) const {
    const unsigned words[4] = {raw[part].x, raw[part].y, raw[part].z, raw[part].w};
    return words[2 * i + word];
  }
};

/// prmt as the hardware has it: a selector of 8 and above is the highest bit of a byte, repeated.
__device__ __forceinline__ unsigned permute_or_repeat(unsigned a, unsigned b, unsigned selectors) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selectors));
  return bytes;
}

/// Numbers of 4 bits: a sign, an exponent of 2 and a mantissa of 1 (E2M1), times two, as bytes of kBias more, so that no
/// byte's highest bit is set: a look-up whose selector has the sign bit gives 0 then. So four numbers are what one table
/// gives for those without the sign and another, with all signs turned, for those with it.
struct CodesE2M1 {
  static constexpr bool kSigned = false, kHalves = true;
  static constexpr int kBytes = kCodeBytes4, kBits = 4, kBias = 12;
  // 12 + 0, 1, 2, 3, 4, 6, 8, 12; 12 less these
  static constexpr unsigned kUp = 0x0f0e0d0cu, kFarUp = 0x18141210u, kDown = 0x090a0b0cu,
                            kFarDown = 0x00040608u;
  uint4 raw;
  __device__ __forceinline__ void load(const char* tile, int lane, int u) {
    raw = *reinterpret_cast<const uint4*>(tile + u * 512 + lane * 16);
  }
  static constexpr int factor(int) { return 1; }
  __device__ __forceinline__ unsigned bytes(int i, int part, int word) const {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w}, w = words[2 * i + word];
    unsigned turned = w ^ 0x88888888u;
    asm("" : "+r"(turned));  // one word for both parts
    // One of both is 0: their sum, which other units make than those that look up.
    return permute_or_repeat(kUp, kFarUp, part == 0 ? w : w >> 16) +
           permute_or_repeat(kDown, kFarDown, part == 0 ? turned : turned >> 16);
  }
};

/// Scales and minima of 6 bits a block under two f16 of 256 columns: [8 rows][4 lanes] bytes: scales of the two
/// blocks, then minima; [8 rows] f16 of scales and of minima.
template <class Codes_>
struct KCodec {
  using Codes = Codes_;
  static constexpr int kColumns = 32, kBytes = Codes::kBytes + kTileRows * 20;
  static constexpr bool kMinima = true;
  unsigned six;
  float d, dmin;
  __device__ __forceinline__ void load(const char* tile, int lane) {
    six = *reinterpret_cast<const unsigned*>(tile + Codes::kBytes + lane * 4);
    const auto both =
        *reinterpret_cast<const unsigned*>(tile + Codes::kBytes + kTileRows * 16 + lane / 4 * 4);
    d = half_of(both, 0);
    dmin = half_of(both, 1);
  }
  /// The scale of a part over its codes' factor, to be multiplied by common().
  __device__ __forceinline__ float scale(int part, int factor) const {
    const float f = 1.0f / static_cast<float>(factor);
    return fmaf(byte_above_2_23(six, part), f, -8388608.0f * f);
  }
  __device__ __forceinline__ float common() const { return d; }
  /// A value is scale times code less this.
  __device__ __forceinline__ float minimum(int part) const {
    return dmin * (byte_above_2_23(six, 2 + part) - 8388608.0f);
  }
  /// The minima's part of the sums of both blocks: exact, and then rounded once.
  __device__ __forceinline__ float minima(const int2& sums) const {
    return dmin * static_cast<float>(static_cast<int>(six >> 16 & 255) * sums.x +
                                     static_cast<int>(six >> 24) * sums.y);
  }
};

/// Scales of 8 bits for each 16 columns under one f16: [8 rows][4 lanes] bytes, 128 more than they are, two a
/// part; [8 rows] f16.
struct Q6KCodec {
  using Codes = Codes6;
  static constexpr int kColumns = 16, kBytes = Codes::kBytes + kTileRows * 18;
  static constexpr bool kMinima = false;
  unsigned eight;
  float d;
  __device__ __forceinline__ void load(const char* tile, int lane) {
    eight = *reinterpret_cast<const unsigned*>(tile + Codes::kBytes + lane * 4);
    d = __half2float(*reinterpret_cast<const __half*>(tile + Codes::kBytes + kTileRows * 16 + lane / 4 * 2));
  }
  /// Of half a part.
  __device__ __forceinline__ float scale(int half, int factor) const {
    const float f = 1.0f / static_cast<float>(factor);
    return fmaf(byte_above_2_23(eight, half), f, -8388736.0f * f);
  }
  __device__ __forceinline__ float common() const { return d; }
};

/// One f16 a block of 32: [8 rows][4 lanes] two, then minima alike where there are any.
template <class Codes_, bool Minima>
struct BlockCodec {
  using Codes = Codes_;
  static constexpr int kColumns = 32, kBytes = Codes::kBytes + kTileRows * (Minima ? 32 : 16);
  static constexpr bool kMinima = Minima;
  unsigned scales, low;
  __device__ __forceinline__ void load(const char* tile, int lane) {
    scales = *reinterpret_cast<const unsigned*>(tile + Codes::kBytes + lane * 4);
    if constexpr (Minima)
      low = *reinterpret_cast<const unsigned*>(tile + Codes::kBytes + kTileRows * 16 + lane * 4);
  }
  __device__ __forceinline__ float scale(int part, int factor) const {
    return half_of(scales, part) * (1.0f / static_cast<float>(factor));
  }
  __device__ __forceinline__ float common() const { return 1.0f; }
  __device__ __forceinline__ float minimum(int part) const { return -half_of(low, part); }
  __device__ __forceinline__ float minima(const int2& sums) const {
    return fmaf(minimum(0), static_cast<float>(sums.x), minimum(1) * static_cast<float>(sums.y));
  }
};

/// An exponent of 8 bits a block of 32: [8 rows][4 lanes] two.
struct Mxfp4Codec {
  using Codes = CodesE2M1;
  static constexpr int kColumns = 32, kBytes = Codes::kBytes + kTileRows * 8;
  static constexpr bool kMinima = false;
  unsigned exponents;
  __device__ __forceinline__ void load(const char* tile, int lane) {
    exponents = *reinterpret_cast<const std::uint16_t*>(tile + Codes::kBytes + lane * 2);
  }
  /// 2^(exponent - 127), halved since codes are doubled; the two least are no normal numbers.
  __device__ __forceinline__ float scale(int part, int) const {
    const unsigned e = exponents >> 8 * part & 255;
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  __device__ __forceinline__ float common() const { return 1.0f; }
};

template <TileFormat F>
struct CodecOf;
template <>
struct CodecOf<TileFormat::q4_0> {
  using Type = BlockCodec<Codes4<true>, false>;
};
template <>
struct CodecOf<TileFormat::q4_1> {
  using Type = BlockCodec<Codes4<false>, true>;
};
template <>
struct CodecOf<TileFormat::q5_0> {
  using Type = BlockCodec<Codes5<true>, false>;
};
template <>
struct CodecOf<TileFormat::q5_1> {
  using Type = BlockCodec<Codes5<false>, true>;
};
template <>
struct CodecOf<TileFormat::q8_0> {
  using Type = BlockCodec<Codes8, false>;
};
template <>
struct CodecOf<TileFormat::q4_k> {
  using Type = KCodec<Codes4<false>>;
};
template <>
struct CodecOf<TileFormat::q5_k> {
  using Type = KCodec<Codes5<false>>;
};
template <>
struct CodecOf<TileFormat::q6_k> {
  using Type = Q6KCodec;
};
template <>
struct CodecOf<TileFormat::mxfp4> {
  using Type = Mxfp4Codec;
};
template <TileFormat F>
using Codec = typename CodecOf<F>::Type;

/// Calls body(std::integral_constant<TileFormat, F>) for the format.
template <class Body>
void with_format(TileFormat format, const Body& body) {
  using enum TileFormat;
  switch (format) {
    case q4_0:
      return body(std::integral_constant<TileFormat, q4_0>());
    case q4_1:
      return body(std::integral_constant<TileFormat, q4_1>());
    case q5_0:
      return body(std::integral_constant<TileFormat, q5_0>());
    case q5_1:
      return body(std::integral_constant<TileFormat, q5_1>());
    case q8_0:
      return body(std::integral_constant<TileFormat, q8_0>());
    case q4_k:
      return body(std::integral_constant<TileFormat, q4_k>());
    case q5_k:
      return body(std::integral_constant<TileFormat, q5_k>());
    case q6_k:
      return body(std::integral_constant<TileFormat, q6_k>());
    case mxfp4:
      return body(std::integral_constant<TileFormat, mxfp4>());
    case none:
      break;
  }
}

}  // namespace lode::cuda
