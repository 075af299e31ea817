// SPDX-License-Identifier: Apache-2.0
// Four bytes for each lane of Vec, and whole numbers as many as lanes, in plain C++: the specification of the
// other codes_*.h.
#pragma once

#include <cstring>

#include "kernels/cpu/simd/vec_scalar.h"

namespace lode {
namespace {

struct Codes {
  std::uint8_t x[4 * Vec::kLanes];
};
struct Ints {
  std::int32_t x[Vec::kLanes];
};

LODE_INLINE Codes load_codes(const std::byte* p) {
  Codes c;
  std::memcpy(c.x, p, sizeof c.x);
  return c;
}
/// The bits from bit `From` on, `Width` of them, moved to bit `To`.
template <int From, int Width, int To>
LODE_INLINE Codes bits_of(Codes c) {
  for (std::uint8_t& x : c.x) x = static_cast<std::uint8_t>(((x >> From) & ((1 << Width) - 1)) << To);
  return c;
}
/// The same, joined with bits that are there already.
template <int From, int Width, int To>
LODE_INLINE Codes with_bits_of(Codes there, Codes c) {
  const Codes more = bits_of<From, Width, To>(c);
  for (int i = 0; i < 4 * Vec::kLanes; ++i) there.x[i] |= more.x[i];
  return there;
}
struct Table {
  std::uint8_t x[16];
};
LODE_INLINE Table table_of(const std::uint8_t* entries) {
  Table t;
  std::memcpy(t.x, entries, 16);
  return t;
}
LODE_INLINE Codes look_up(Table t, Codes c) {
  for (std::uint8_t& x : c.x) x = t.x[x];
  return c;
}
LODE_INLINE Ints no_ints() {
  return {};
}
/// *p times 2^shift in each lane.
template <int kShift>
LODE_INLINE Ints same_ints(const std::int32_t* p) {
  Ints r;
  for (std::int32_t& x : r.x) x = *p * (1 << kShift);
  return r;
}
/// sum + the four products of each lane's codes with x[0] to x[3]. Codes of up to kBits bits, not of 8 bits by
/// such as cannot do better, must not be above 127.
template <int kBits>
LODE_INLINE Ints add_products(Ints sum, Codes codes, const std::int8_t* x) {
  for (int i = 0; i < Vec::kLanes; ++i)
    for (int c = 0; c < 4; ++c) sum.x[i] += codes.x[4 * i + c] * x[c];
  return sum;
}
/// sum + 256 upper
LODE_INLINE Ints with_upper(Ints sum, Ints upper) {
  for (int i = 0; i < Vec::kLanes; ++i) sum.x[i] += 256 * upper.x[i];
  return sum;
}
LODE_INLINE Vec to_floats(Ints a) {
  float f[Vec::kLanes];
  for (int i = 0; i < Vec::kLanes; ++i) f[i] = static_cast<float>(a.x[i]);
  return load(f);
}

}  // namespace
}  // namespace lode
