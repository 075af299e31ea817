// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/quantized_keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace lode {

float BeamKeys::scale(std::int64_t node) const {
  float scale;
  std::memcpy(&scale, codes(node) + rows.stride - CodedRows::kScaleBytes, sizeof scale);
  return scale;
}

void QuantizedKeys::resize(std::int64_t keys) {
  resize_tightly(rows_, static_cast<std::size_t>(keys * stride_));
  resize_tightly(squares_, static_cast<std::size_t>(keys));
}

void QuantizedKeys::put(std::int64_t at, std::span<const float> key) {
  float most = 0.0f;
  bool finite = true;
  for (const float x : key) {
    most = std::max(most, std::abs(x));
    finite = finite && std::isfinite(x);
  }
  const float scale = finite && most > 0.0f ? most / 127.0f : 0.0f;
  // Of subnormal numbers the reciprocal is infinite; they count as 0.
  const float inverse = scale > 0.0f && std::isfinite(1.0f / scale) ? 1.0f / scale : 0.0f;
  std::byte* const row = rows_.data() + at * stride_;
  auto* const codes = reinterpret_cast<std::int8_t*>(row);
  std::fill_n(row, stride_, std::byte{0});
  std::int64_t square = 0;
  for (std::size_t i = 0; inverse > 0.0f && i < key.size(); ++i) {
    codes[i] = static_cast<std::int8_t>(std::nearbyint(key[i] * inverse));
    square += codes[i] * codes[i];
  }
  const float kept = inverse > 0.0f ? scale : 0.0f;
  std::memcpy(row + stride_ - CodedRows::kScaleBytes, &kept, sizeof kept);
  squares_[static_cast<std::size_t>(at)] = static_cast<float>(static_cast<double>(square) * scale * scale);
}

BeamKeys QuantizedKeys::view() const {
  return {.rows = {.data = rows_.data(), .stride = stride_}, .d = d_, .squares = squares_.data()};
}

std::int64_t QuantizedKeys::bytes() const {
  return static_cast<std::int64_t>(rows_.capacity() + squares_.capacity() * sizeof(float));
}

}  // namespace lode
