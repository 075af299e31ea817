// SPDX-License-Identifier: Apache-2.0
// Eight numbers beside one another, as an index holds them: of the type of the keys, or codes of 2 or 4 bits
// of levels for each channel (ann/packed_codes.h).
#pragma once

#include "kernels/cuda/device/element.cuh"

namespace lode::cuda {

/// As they are stored.
template <class T>
struct Stored {
  static constexpr int kBytes = 8 * static_cast<int>(sizeof(T)), kPacks = kBytes / 16;
  uint4 raw[kPacks];
  __device__ void load(const char* from) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ void widened(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float some[kPack<T>];
      widen_pack<T>(raw[i], some);
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) x[i * kPack<T> + k] = some[k];
    }
  }
};

/// Codes, the first in the lowest bits of a word.
template <class Word>
struct Coded {
  static constexpr int kBytes = sizeof(Word), kBits = kBytes;
  unsigned raw;
  __device__ void load(const char* from) { raw = *reinterpret_cast<const Word*>(from); }
  /// A whole number below 2^23 in the bits of 2^23 is that much more.
  __device__ void widened(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = __uint_as_float(0x4b000000u | (raw >> kBits * i & ((1u << kBits) - 1))) - 8388608.0f;
  }
};

enum class CodeRounding { nearest, down, up };

/// As ChannelLevels::code, in double as there.
__device__ inline unsigned code_of(float x, float low, float step, int bits, CodeRounding rounding) {
  if (!(step > 0.0f)) return 0;
  const double level = (static_cast<double>(x) - low) / step;
  const double rounded = rounding == CodeRounding::down ? floor(level)
                         : rounding == CodeRounding::up ? ceil(level)
                                                        : floor(level + 0.5);
  return static_cast<unsigned>(fmin(fmax(rounded, 0.0), static_cast<double>((1 << bits) - 1)));
}

/// The codes of eight lanes become a word, which the first of them writes where it has a place for it. Called
/// by whole warps.
__device__ inline void put_codes(char* place, unsigned code, int bits) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned word = code << bits * (lane % 8);
#pragma unroll
  for (int o = 1; o < 8; o *= 2) word |= __shfl_xor_sync(~0u, word, o);
  if (lane % 8 != 0 || place == nullptr) return;
  if (bits == 4)
    *reinterpret_cast<std::uint32_t*>(place) = word;
  else
    *reinterpret_cast<std::uint16_t*>(place) = static_cast<std::uint16_t>(word);
}

}  // namespace lode::cuda
