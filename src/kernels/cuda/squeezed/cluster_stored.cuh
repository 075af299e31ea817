// SPDX-License-Identifier: Apache-2.0
// Exponentials as the first pass of a choice for a block of queries stores them (cluster_products.cuh):
// halves of at least 0 without their last three bits, 12 bits of which 7 are a fraction's, as bfloat16 has
// them.
#pragma once

#include <cuda_fp16.h>

namespace lode::cuda {

inline constexpr int kStoredWords = 12;  // of 32 numbers
inline constexpr int kStoredPieces = 6;  // of 16 bytes: 2 x 32 numbers that a thread has of a product
inline constexpr int kStoredGroup = kStoredPieces * 32 + 4;  // of 16 rows and a tile, with the rows' bases
// A row's numbers are relative to a base, such that the largest of its first tile is near this (log2), and to
// another one from where a thread's sum of a tile would be more than the other.
inline constexpr float kStoredPeak = 6.0f, kMostStored = 0x1p15f;

/// Bases of a group's 16 rows, behind its numbers.
__device__ __forceinline__ float* bases_of(uint4* group) {
  return reinterpret_cast<float*>(group + kStoredPieces * 32);
}

/// Eight numbers, two a word, as three words: the fourth word's twelve bits are where the others have none.
__device__ __forceinline__ void pack_stored(const __half2 (&numbers)[4], unsigned* to /*[3]*/) {
  unsigned bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bits[i] = (*reinterpret_cast<const unsigned*>(&numbers[i]) + 0x00040004u) >> 3 & 0x0fff0fffu;
#pragma unroll
  for (int i = 0; i < 3; ++i) to[i] = bits[i] | (bits[3] << (12 - 4 * i) & 0xf000f000u);
}

__device__ __forceinline__ void unpack_stored(const unsigned* from /*[3]*/, float2 (&numbers)[4]) {
  unsigned last = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) last |= (from[i] & 0xf000f000u) >> (12 - 4 * i);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned bits = (i < 3 ? from[i] & 0x0fff0fffu : last) << 3;
    numbers[i] = __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
}

}  // namespace lode::cuda
