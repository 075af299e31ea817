// SPDX-License-Identifier: Apache-2.0
#include "model/expert_tensors.h"

#include <cstring>

#include "kernels/dequantise.h"
#include "lodestone/error.h"

namespace lode {

namespace {

std::byte* make_room(std::int64_t bytes, OwnedBytes& owned) {
  return owned.emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)))
      .get();
}

/// Which of n outputs in the file becomes output i.
std::int64_t source_of(std::int64_t i, std::int64_t n, bool in_turn) {
  if (!in_turn) return i;
  return i < n / 2 ? 2 * i : 2 * (i - n / 2) + 1;
}

}  // namespace

Weight from_columns(const Weight& w, std::span<const std::int64_t> shape, bool in_turn, OwnedBytes& owned) {
  LODE_ASSERT(is_plain(w.type) && shape.size() == 3);
  const std::int64_t out = shape[1], in = shape[2], unit = bytes_of(w.type, 1);
  const auto size = static_cast<std::size_t>(unit);
  std::byte* const to = make_room(shape[0] * out * in * unit, owned);
  for (std::int64_t e = 0; e < shape[0]; ++e)
    for (std::int64_t row = 0; row < out; ++row) {
      const std::byte* const from = w.data + (e * in * out + source_of(row, out, in_turn)) * unit;
      std::byte* const at = to + (e * out + row) * in * unit;
      for (std::int64_t col = 0; col < in; ++col) std::memcpy(at + col * unit, from + col * out * unit, size);
    }
  return {to, w.type, shape[0] * out, in};
}

Weight as_plain(const Weight& w, OwnedBytes& owned) {
  if (is_plain(w.type)) return w;
  auto* const to = reinterpret_cast<float*>(make_room(w.rows * w.cols * std::int64_t{sizeof(float)}, owned));
  dequantise(w.type, w.data, w.rows * w.cols, to);
  return {reinterpret_cast<const std::byte*>(to), WeightType::f32, w.rows, w.cols};
}

Weight apart(const Weight& w, OwnedBytes& owned) {
  const std::int64_t unit = bytes_of(w.type, 1);
  std::byte* const to = make_room(w.rows * w.cols * unit, owned);
  for (std::int64_t row = 0; row < w.rows; ++row)
    for (std::int64_t i = 0; i < w.cols; ++i)
      std::memcpy(to + (row * w.cols + i) * unit, w.data + (row * w.cols + source_of(i, w.cols, true)) * unit,
                  static_cast<std::size_t>(unit));
  return {to, w.type, w.rows, w.cols};
}

Weight from_mxfp4(std::span<const std::byte> blocks, std::span<const std::byte> scales,
                  std::span<const std::int64_t> shape, bool in_turn, OwnedBytes& owned) {
  constexpr std::int64_t kBlock = 32, kBytes = 17;  // an exponent, then 16 bytes: i low, i + 16 high
  const std::int64_t out = shape[1], in = shape[2], row_blocks = in / kBlock;
  std::byte* at = make_room(shape[0] * out * row_blocks * kBytes, owned);
  const Weight whole = {at, WeightType::mxfp4, shape[0] * out, in};
  const auto code = [](const std::byte* from, std::int64_t i) {
    return (i % 2 == 0 ? from[i / 2] : from[i / 2] >> 4) & std::byte{15};
  };
  for (std::int64_t row = 0; row < shape[0] * out; ++row) {
    const std::int64_t source = row / out * out + source_of(row % out, out, in_turn);
    for (std::int64_t b = 0; b < row_blocks; ++b, at += kBytes) {
      const std::int64_t block = source * row_blocks + b;
      const std::byte* const from = blocks.data() + block * 16;
      at[0] = scales[static_cast<std::size_t>(block)];
      for (std::int64_t i = 0; i < 16; ++i) at[1 + i] = code(from, i) | code(from, i + 16) << 4;
    }
  }
  return whole;
}

}  // namespace lode
