// SPDX-License-Identifier: Apache-2.0
// The vector of the plain C++ table: four floats and loops. It is the specification of the other vec_*.h
// files: same names, same meaning. Everything here has internal linkage, so that no other translation unit
// can pick it up.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cpu/simd/inline.h"
#include "kernels/q4_rows.h"
#include "lodestone/types.h"

namespace lode {
namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr int kTileRows = 4;  ///< rows of a register tile of tile_fma (times 2 vectors)
  using Lanes =
      float __attribute__((vector_size(16)));  // the compiler's own vectors: no instruction set is asked for
  Lanes x;
};

LODE_INLINE float widen_half(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Exponent 0 is a denormal: shift into place and multiply by 2^112, which is exact for both kinds.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}
LODE_INLINE float widen_bf16(std::uint16_t h) {
  return std::bit_cast<float>(std::uint32_t(h) << 16);
}

LODE_INLINE std::uint16_t narrow_half(float f) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds beyond the largest half
  if (a < 0x38800000u) {  // denormal half: adding 0.5 puts the wanted bits last in the sum, rounded to even
    const float sum = std::bit_cast<float>(a) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}
LODE_INLINE std::uint16_t narrow_bf16(float f) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#define LODE_EACH for (int i = 0; i < Vec::kLanes; ++i)

LODE_INLINE Vec set1(float a) {
  return {Vec::Lanes{a, a, a, a}};
}
LODE_INLINE Vec load(const float* p) {
  Vec r;
  __builtin_memcpy(&r.x, p, sizeof r.x);
  return r;
}
/// The first n lanes, n in [0, kLanes]; the others are 0.
LODE_INLINE Vec load_first(const float* p, int n) {
  Vec r;
  LODE_EACH r.x[i] = i < n ? p[i] : 0.0f;
  return r;
}
LODE_INLINE void store(float* p, Vec a) {
  LODE_EACH p[i] = a.x[i];
}
LODE_INLINE void store_first(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.x[i];
}
/// p[i * stride] for the first n lanes; the others repeat lane n - 1.
LODE_INLINE Vec load_strided(const float* p, std::int64_t stride, int n) {
  Vec r;
  LODE_EACH r.x[i] = p[(i < n ? i : n - 1) * stride];
  return r;
}
/// Lane i is p[i % R].
template <int R>
LODE_INLINE Vec load_repeated(const float* p) {
  Vec r;
  LODE_EACH r.x[i] = p[i % R];
  return r;
}

/// A number at any address: of mapped files they may be odd.
template <class Number>
LODE_INLINE Number number_at(const std::byte* p) {
  Number number;
  __builtin_memcpy(&number, p, sizeof number);
  return number;
}
/// kLanes (or the first n) elements of a stored type, widened. q8 is widened without its scale.
template <DType T>
LODE_INLINE float widen_one(const std::byte* p) {
  if constexpr (T == DType::f32) return number_at<float>(p);
  if constexpr (T == DType::f16) return widen_half(number_at<std::uint16_t>(p));
  if constexpr (T == DType::bf16) return widen_bf16(number_at<std::uint16_t>(p));
  if constexpr (T == DType::q8) return *reinterpret_cast<const std::int8_t*>(p);
}
template <DType T>
LODE_INLINE Vec load_as_first(const std::byte* p, int n) {
  Vec r;
  LODE_EACH r.x[i] = i < n ? widen_one<T>(p + i * bytes_of(T)) : 0.0f;
  return r;
}
template <DType T>
LODE_INLINE Vec load_as(const std::byte* p) {
  return load_as_first<T>(p, Vec::kLanes);
}
/// Lanes [c, c + kLanes) of a q4 row of d columns, as they are stored: turned, c a multiple of kLanes.
LODE_INLINE Vec load_q4(const std::byte* row, int c, int d) {
  const std::byte* const codes = row + c / kQ4Group * (kQ4Group / 2);
  const std::byte* const scales = row + (d + kQ4Group - 1) / kQ4Group * (kQ4Group / 2);
  const float scale = widen_half(number_at<std::uint16_t>(scales + c / kQ4Group * 2));
  Vec r;
  LODE_EACH {
    const auto word = number_at<std::uint32_t>(codes + i % 4 * 4);
    r.x[i] = kQ4Levels[word >> (c % kQ4Group / 4 * 4 + i / 4 * 4) & 15u] * scale;
  }
  return r;
}
/// The first n lanes, the others are 0.
LODE_INLINE Vec load_q4_first(const std::byte* row, int c, int n, int d) {
  Vec r = load_q4(row, c, d);
  LODE_EACH r.x[i] = i < n ? r.x[i] : 0.0f;
  return r;
}
/// Rounds to nearest even and stores the first n lanes.
LODE_INLINE void store_half_first(std::uint16_t* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow_half(a.x[i]);
}
LODE_INLINE void store_bf16_first(std::uint16_t* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = narrow_bf16(a.x[i]);
}

LODE_INLINE Vec operator+(Vec a, Vec b) {
  return {a.x + b.x};
}
LODE_INLINE Vec operator-(Vec a, Vec b) {
  return {a.x - b.x};
}
LODE_INLINE Vec operator*(Vec a, Vec b) {
  return {a.x * b.x};
}
/// a * b + c; fused where the machine can.
LODE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {a.x * b.x + c.x};
}
/// The larger of `best` and `next`; a NaN in `next` is passed over.
LODE_INLINE Vec max_passing_nan(Vec best, Vec next) {
  return {next.x > best.x ? next.x : best.x};
}
LODE_INLINE Vec sqrt_of(Vec a) {
  LODE_EACH a.x[i] = __builtin_sqrtf(a.x[i]);
  return a;
}
/// a where limit > at (as integers held in floats), else `other`.
LODE_INLINE Vec where_above(Vec limit, Vec at, Vec a, Vec other) {
  return {limit.x > at.x ? a.x : other.x};
}
/// Whether a > b in any lane.
LODE_INLINE bool any_above(Vec a, Vec b) {
  bool any = false;
  LODE_EACH any |= a.x[i] > b.x[i];
  return any;
}
/// 2^n for integral n in [-126, 127]; any number otherwise.
LODE_INLINE Vec pow2(Vec n) {
  LODE_EACH n.x[i] = n.x[i] >= -126.0f && n.x[i] <= 127.0f
                         ? std::bit_cast<float>((static_cast<std::int32_t>(n.x[i]) + 127) << 23)
                         : 0.0f;
  return n;
}
/// Nearest integer, for |a| < 2^22.
LODE_INLINE Vec round_nearest(Vec a) {
  return (a + set1(12582912.0f)) - set1(12582912.0f);
}
/// 0 where a < low, else b; NaN in a keeps b.
LODE_INLINE Vec zero_below(Vec a, Vec low, Vec b) {
  return {a.x < low.x ? Vec::Lanes{} : b.x};
}
/// Lane i becomes the sum of the lanes of acc[i], always added in the same order.
LODE_INLINE Vec sum_lanes(Vec (&acc)[Vec::kLanes]) {
  const auto sum = [](Vec a) { return (a.x[0] + a.x[2]) + (a.x[1] + a.x[3]); };
  return {Vec::Lanes{sum(acc[0]), sum(acc[1]), sum(acc[2]), sum(acc[3])}};
}

#undef LODE_EACH

}  // namespace
}  // namespace lode
