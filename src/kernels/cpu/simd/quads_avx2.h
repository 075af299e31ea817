// SPDX-License-Identifier: Apache-2.0
// Products of quads of bytes in registers of AVX2, by products of 16 bits. A register has four bytes for each lane of a Vec.
// Sums are exact: they are the same for every instruction set.
#pragma once

#include <cstring>

#include "kernels/cpu/simd/vec_avx2.h"
//
#include "kernels/cpu/simd/exp-inl.h"

namespace lode {
namespace {

struct Int32s {
  __m256i x;
};
LODE_INLINE Int32s load_ints(const std::int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
LODE_INLINE Int32s no_ints() {
  return {_mm256_setzero_si256()};
}
LODE_INLINE Vec to_floats(Int32s a) {
  return {_mm256_cvtepi32_ps(a.x)};
}
/// The low 16 bits of each number, rounded; 0 of a NaN.
LODE_INLINE void store_words(std::uint16_t* p, Vec a) {
  const __m256i x = _mm256_and_si256(_mm256_cvtps_epi32(a.x), _mm256_set1_epi32(0xffff));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
/// exp_of, or what takes fewer operations and is as good for weights.
LODE_INLINE Vec exp_of_weight(Vec a) {
  return exp_of(a);
}
LODE_INLINE Vec quotient(float a, Vec b) {
  return {_mm256_div_ps(_mm256_set1_ps(a), b.x)};
}
/// The one whose bits are the larger unsigned number: of numbers from 0 on the larger one, else what is none of them.
LODE_INLINE Vec max_bits(Vec a, Vec b) {
  return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.x), _mm256_castps_si256(b.x)))};
}
/// Whether the bits in any lane, as unsigned numbers, are not in [low, high).
LODE_INLINE bool any_bits_outside(Vec a, Vec low, Vec high) {
  const __m256i x = _mm256_sub_epi32(_mm256_castps_si256(a.x), _mm256_castps_si256(low.x));
  const __m256i span = _mm256_sub_epi32(_mm256_castps_si256(high.x), _mm256_castps_si256(low.x));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(x, span), x)) != 0;
}

template <int kBy>
LODE_INLINE __m256i swap_lanes(__m256i x) {
  if constexpr (kBy == 1) return _mm256_shuffle_epi32(x, 0xb1);
  if constexpr (kBy == 2) return _mm256_shuffle_epi32(x, 0x4e);
  if constexpr (kBy == 4) return _mm256_permute2x128_si256(x, x, 0x01);
}
/// Lane i becomes lane i ^ kBy.
template <int kBy>
LODE_INLINE Vec swap_lanes(Vec a) {
  return {_mm256_castsi256_ps(swap_lanes<kBy>(_mm256_castps_si256(a.x)))};
}
/// One step of summing each E lanes: by steps of 1, 2, 4, ... E / 2, E registers become one, of whose E lanes lane j has the sum
/// of register j.
template <int E, int kBy>
LODE_INLINE Int32s fold(Int32s a, Int32s b) {
  __m256i own, other;
  if constexpr (kBy == 1 && E == 2) {
    own = _mm256_blend_epi32(a.x, b.x, 0xaa), other = swap_lanes<1>(_mm256_blend_epi32(b.x, a.x, 0xaa));
  } else if constexpr (kBy == 1) {
    own = _mm256_unpacklo_epi32(a.x, b.x), other = _mm256_unpackhi_epi32(a.x, b.x);
  } else if constexpr (kBy == 2) {
    own = _mm256_unpacklo_epi64(a.x, b.x), other = _mm256_unpackhi_epi64(a.x, b.x);
  } else {
    own = _mm256_blend_epi32(a.x, b.x, 0xf0), other = _mm256_permute2x128_si256(a.x, b.x, 0x21);
  }
  return {_mm256_add_epi32(own, other)};
}
/// Lane i is p[i % E].
template <int E>
LODE_INLINE Vec repeated(const float* p) {
  return load_repeated<E>(p);
}

using Bytes = __m256i;
LODE_INLINE Bytes load_bytes(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
/// The first `count`, the others are 0.
LODE_INLINE Bytes load_bytes_first(const std::byte* p, int count) {
  alignas(32) std::byte all[32] = {};
  std::memcpy(all, p, static_cast<std::size_t>(count));
  return load_bytes(all);
}
LODE_INLINE __m256i even_words(__m256i x) {
  return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
}
LODE_INLINE __m256i odd_words(__m256i x) {
  return _mm256_srai_epi16(x, 8);
}
/// A G-th of a register, G times.
template <int G>
LODE_INLINE __m256i load_for_each(const std::byte* p) {
  if constexpr (G == 1) return load_bytes(p);
  if constexpr (G == 2)
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (G == 4) return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
LODE_INLINE __m256i four_bytes(const std::byte* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
/// To an address at a bound of a register.
LODE_INLINE void store_bytes(std::byte* to, __m256i x) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), x);
}
/// sum + a b + c d, the products of two words in each lane.
LODE_INLINE __m256i add_products(__m256i sum, __m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(a, b), _mm256_madd_epi16(c, d)));
}
/// The words of G queries against such a piece.
struct QueryPiece {
  __m256i first, second;
};
LODE_INLINE QueryPiece load_query(const std::byte* p) {
  return {load_bytes(p), load_bytes(p + 32)};
}

}  // namespace
}  // namespace lode

#include "kernels/cpu/simd/quads_words-inl.h"

namespace lode {
namespace {

/// The words of one query for a register of columns, as the two registers of load_query have them.
LODE_INLINE void split_query(const std::uint16_t* q, std::byte* first, std::byte* second) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  for (int half = 0; half < 2; ++half) {
    // Each four words: the even ones, then the odd ones.
    const __m256i apart = _mm256_shuffle_epi8(
        load_bytes(reinterpret_cast<const std::byte*>(q + 16 * half)),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
    const __m256i both = _mm256_permutevar8x32_epi32(apart, order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first + 16 * half), _mm256_castsi256_si128(both));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(second + 16 * half), _mm256_extracti128_si256(both, 1));
  }
}
/// Four rows byte by byte: columns 16 L + 4 kOutput + e in lane 4 L + e.
template <int kOutput>
LODE_INLINE Quads interleave(const Bytes (&x)[4]) {
  const auto pairs = [](__m256i a, __m256i b) LODE_INLINE_LAMBDA {
    return kOutput < 2 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
  };
  const __m256i a = pairs(x[0], x[1]), b = pairs(x[2], x[3]);
  return quads_of(kOutput % 2 == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b));
}
/// The whole numbers below both, which fit words; 0 of a NaN. In each half of the register those of a first.
LODE_INLINE __m256i words_of(Vec a, Vec b) {
  return _mm256_packus_epi32(_mm256_cvttps_epi32(a.x), _mm256_cvttps_epi32(b.x));
}
/// Weights of a block of keys for G queries, their fractions cut off.
template <int G>
struct QuadWeights {
  alignas(32) std::byte words[2 * kWordBlock * G];
  /// Vector t of scores, see quad_scores.
  LODE_INLINE void store(int t, Vec a) {
    const __m256i both = _mm256_permute4x64_epi64(words_of(a, a), 0xd8);
    _mm_store_si128(reinterpret_cast<__m128i*>(words + 16 * t), _mm256_castsi256_si128(both));
  }
  /// Vectors t and t + 1, where each has two keys: those of each query side by side.
  LODE_INLINE void store(int t, Vec a, Vec b) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 16 * t),
                       _mm256_shuffle_epi32(words_of(a, b), 0xd8));
  }
};
}  // namespace
}  // namespace lode
