// SPDX-License-Identifier: Apache-2.0
// Thirty-two bytes in a register of AVX2. What each function means is said in codes_scalar.h.
#pragma once

#include <cstring>

#include "kernels/cpu/simd/vec_avx2.h"

namespace lode {
namespace {

struct Codes {
  __m256i x;
};
struct Ints {
  __m256i x;
};

LODE_INLINE Codes load_codes(const std::byte* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
template <int From, int Width, int To>
LODE_INLINE Codes bits_of(Codes c) {
  __m256i moved = c.x;
  if constexpr (From > To) moved = _mm256_srli_epi16(moved, From - To);
  if constexpr (From < To) moved = _mm256_slli_epi16(moved, To - From);
  return {_mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(((1 << Width) - 1) << To)))};
}
template <int From, int Width, int To>
LODE_INLINE Codes with_bits_of(Codes there, Codes c) {
  return {_mm256_or_si256(there.x, bits_of<From, Width, To>(c).x)};
}
struct Table {
  __m256i x;
};
LODE_INLINE Table table_of(const std::uint8_t* entries) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)))};
}
LODE_INLINE Codes look_up(Table t, Codes c) {
  return {_mm256_shuffle_epi8(t.x, c.x)};
}
LODE_INLINE Ints no_ints() {
  return {_mm256_setzero_si256()};
}
template <int kShift>
LODE_INLINE Ints same_ints(const std::int32_t* p) {
  return {_mm256_slli_epi32(_mm256_set1_epi32(*p), kShift)};
}
template <int kBits>
LODE_INLINE Ints add_products(Ints sum, Codes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m256i ones = _mm256_set1_epi16(1), all = _mm256_set1_epi32(four);
  if constexpr (kBits < 8)  // two products of at most 127 x 127 fit 16 bits
    return {_mm256_add_epi32(sum.x, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.x, all), ones))};
  // Two products of 255 x 127 do not: one at a time.
  const __m256i even = _mm256_set1_epi16(0xff);
  const __m256i first = _mm256_maddubs_epi16(_mm256_and_si256(codes.x, even), all),
                second = _mm256_maddubs_epi16(_mm256_andnot_si256(even, codes.x), all);
  return {_mm256_add_epi32(
      sum.x, _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones)))};
}
LODE_INLINE Ints with_upper(Ints sum, Ints upper) {
  return {_mm256_add_epi32(sum.x, _mm256_slli_epi32(upper.x, 8))};
}
LODE_INLINE Vec to_floats(Ints a) {
  return {_mm256_cvtepi32_ps(a.x)};
}

}  // namespace
}  // namespace lode
