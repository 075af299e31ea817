// SPDX-License-Identifier: Apache-2.0
// How a model's weights are stored: plain floats, or blocks that share scales (ggml's formats). Apart from
// DType, which says how keys and values are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "lodestone/types.h"

namespace lode {

enum class WeightType : std::uint8_t {
  f32,
  f16,
  bf16,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  iq3_s,
  iq3_xxs,
  mxfp4
};

/// One type's layout: `block` numbers lie in `block_bytes` bytes.
struct WeightLayout {
  WeightType type;
  std::string_view name;    ///< as GGUF tools spell it: "Q4_K"
  std::uint32_t gguf_type;  ///< its number in a GGUF file
  std::int64_t block;       ///< numbers of one block; a row holds whole blocks
  std::int64_t block_bytes;
};

/// All types, in the order of the enum.
std::span<const WeightLayout> weight_layouts();
const WeightLayout& layout_of(WeightType type);

inline std::string_view name_of(WeightType type) {
  return layout_of(type).name;
}
/// Bytes of n numbers; n is a multiple of the block.
inline std::int64_t bytes_of(WeightType type, std::int64_t n) {
  return n / layout_of(type).block * layout_of(type).block_bytes;
}
/// Parses "Q4_K" or "q4_k"; nothing for an unknown name.
std::optional<WeightType> find_weight_type(std::string_view name);
/// By the number that GGUF files use; nothing for a type that is not supported.
std::optional<WeightType> find_gguf_type(std::uint32_t number);

constexpr bool is_plain(WeightType type) {
  return type <= WeightType::bf16;
}
/// Of a plain type.
constexpr DType plain_dtype(WeightType type) {
  return type == WeightType::f16 ? DType::f16 : type == WeightType::bf16 ? DType::bf16 : DType::f32;
}
constexpr WeightType weight_type_of(DType type) {
  return type == DType::f16 ? WeightType::f16 : type == DType::bf16 ? WeightType::bf16 : WeightType::f32;
}

}  // namespace lode
