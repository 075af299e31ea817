// SPDX-License-Identifier: Apache-2.0
// Sixty-four bytes in a register of AVX-512, with VNNI where the build has it. What each function means is said
// in codes_scalar.h.
#pragma once

#include <cstring>

#include "kernels/cpu/simd/vec_avx512.h"

namespace lode {
namespace {

struct Codes {
  __m512i x;
};
struct Ints {
  __m512i x;
};

LODE_INLINE Codes load_codes(const std::byte* p) {
  return {_mm512_loadu_si512(p)};
}
template <int From, int To>
LODE_INLINE __m512i moved(__m512i x) {
  if constexpr (From > To) return _mm512_srli_epi16(x, From - To);
  if constexpr (From < To) return _mm512_slli_epi16(x, To - From);
  return x;
}
template <int Width, int To>
LODE_INLINE __m512i mask_of_bits() {
  return _mm512_set1_epi8(static_cast<char>(((1 << Width) - 1) << To));
}
template <int From, int Width, int To>
LODE_INLINE Codes bits_of(Codes c) {
  return {_mm512_and_si512(moved<From, To>(c.x), mask_of_bits<Width, To>())};
}
template <int From, int Width, int To>
LODE_INLINE Codes with_bits_of(Codes there, Codes c) {
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const __m512i moved_bits = moved<From, To>(c.x),
                mask = mask_of_bits<Width, To>();  // clang has a macro here
  return {_mm512_ternarylogic_epi32(there.x, moved_bits, mask, kOrAnd)};
}
struct Table {
  __m512i x;
};
LODE_INLINE Table table_of(const std::uint8_t* entries) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)))};
}
LODE_INLINE Codes look_up(Table t, Codes c) {
  return {_mm512_shuffle_epi8(t.x, c.x)};
}
LODE_INLINE Ints no_ints() {
  return {_mm512_setzero_si512()};
}
template <int kShift>
LODE_INLINE Ints same_ints(const std::int32_t* p) {
  return {_mm512_slli_epi32(_mm512_set1_epi32(*p), kShift)};
}
template <int kBits>
LODE_INLINE Ints add_products(Ints sum, Codes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  const __m512i all = _mm512_set1_epi32(four);
#ifdef __AVX512VNNI__
  return {_mm512_dpbusd_epi32(sum.x, codes.x, all)};
#else
  const __m512i ones = _mm512_set1_epi16(1);
  if constexpr (kBits < 8)  // two products of at most 127 x 127 fit 16 bits
    return {_mm512_add_epi32(sum.x, _mm512_madd_epi16(_mm512_maddubs_epi16(codes.x, all), ones))};
  // Two products of 255 x 127 do not: one at a time.
  const __m512i even = _mm512_set1_epi16(0xff);
  const __m512i first = _mm512_maddubs_epi16(_mm512_and_si512(codes.x, even), all),
                second = _mm512_maddubs_epi16(_mm512_andnot_si512(even, codes.x), all);
  return {_mm512_add_epi32(
      sum.x, _mm512_add_epi32(_mm512_madd_epi16(first, ones), _mm512_madd_epi16(second, ones)))};
#endif
}
LODE_INLINE Ints with_upper(Ints sum, Ints upper) {
  return {_mm512_add_epi32(sum.x, _mm512_slli_epi32(upper.x, 8))};
}
LODE_INLINE Vec to_floats(Ints a) {
  return {_mm512_cvtepi32_ps(a.x)};
}

}  // namespace
}  // namespace lode
