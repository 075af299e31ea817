// SPDX-License-Identifier: Apache-2.0
#include "lodestone/types.h"

#include <array>
#include <string>
#include <utility>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::array<std::pair<DType, std::string_view>, 5> kNames = {
    {{DType::f32, "f32"}, {DType::f16, "f16"}, {DType::bf16, "bf16"}, {DType::q8, "q8"}, {DType::q4, "q4"}}};

}  // namespace

std::string_view name_of(DType type) {
  return kNames[static_cast<std::size_t>(type)].second;
}

DType parse_dtype(std::string_view text) {
  for (const auto& [type, name] : kNames) {
    if (name == text) return type;
  }
  throw InputError("expected a type of f32, f16, bf16, q8, q4, found '" + excerpt(text) + "'");
}

float to_float(f16 x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals
  return sign != 0 ? -magnitude : magnitude;
}

f16 to_f16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u)
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (magnitude <
      0x38800000u) {  // below 2^-14: subnormal; adding 0.5 lets the float adder round to multiples of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0x7ffu))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace lode
