// SPDX-License-Identifier: Apache-2.0
// Numbers and views that every folder shares. Letters: B sequences, T new tokens, S cached positions, L
// layers, Hq query heads, Hkv KV heads, G = Hq / Hkv (the group), d head dimension, D model dimension, V
// vocabulary.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string_view>

namespace lode {

using TokenId = std::int32_t;
using Position = std::int32_t;  ///< index of a token in its sequence, from 0

/// How numbers lie in memory. q8: int8 with one float32 scale a row; q4: 16 levels, an f16 scale for each kQ4Group
/// (both in the KV store only).
enum class DType : std::uint8_t { f32, f16, bf16, q8, q4 };
inline constexpr int kQ4Group = 32;

std::string_view name_of(DType type);
/// Bytes of one element; the scale of a q8 row is not in it. 0 for q4, of which only rows have bytes.
constexpr int bytes_of(DType type) {
  return type == DType::f32 ? 4 : type == DType::q8 ? 1 : type == DType::q4 ? 0 : 2;
}
/// Bytes of a row of d numbers; of q4 with its scales, of q8 without.
constexpr std::int64_t row_bytes_of(DType type, std::int64_t d) {
  return type == DType::q4 ? (d + kQ4Group - 1) / kQ4Group * (kQ4Group / 2 + 2) : bytes_of(type) * d;
}
/// Parses "f32", "f16", "bf16", "q8", "q4"; throws InputError that lists them.
DType parse_dtype(std::string_view text);

/// The upper half of a float32.
struct bf16 {
  std::uint16_t bits = 0;
};
/// IEEE binary16.
struct f16 {
  std::uint16_t bits = 0;
};

constexpr float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
/// Rounds to nearest even; NaN stays NaN.
constexpr bf16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
float to_float(f16 x);
f16 to_f16(float x);  ///< rounds to nearest even; overflow gives infinity

/// A row-major matrix that somebody else owns. `stride` counts elements from one row to the next.
template <class T>
struct Matrix {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;

  Matrix() = default;
  Matrix(T* data_, std::int64_t rows_, std::int64_t cols_) : Matrix(data_, rows_, cols_, cols_) {}
  Matrix(T* data_, std::int64_t rows_, std::int64_t cols_, std::int64_t stride_)
      : data(data_), rows(rows_), cols(cols_), stride(stride_) {}
  template <class U>
  requires std::is_same_v<const U, T> Matrix(const Matrix<U>& other)
      : Matrix(other.data, other.rows, other.cols, other.stride) {}

  std::span<T> operator[](std::int64_t row) const {
    return {data + row * stride, static_cast<std::size_t>(cols)};
  }
};

}  // namespace lode
