// SPDX-License-Identifier: Apache-2.0
// What the 8-bit products of all instruction sets share. Internal linkage: each table has its own copy,
// compiled with its own flags.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/int8_product.h"

namespace lode {
namespace {

constexpr float kLeastScale = 1e-33f;  // its inverse is a float

float encode(const float* x, std::int64_t n, int limit, std::int16_t* codes) noexcept {
  // Without their signs, numbers are in the order of their bits, infinity and NaN above all others.
  std::int32_t peak_bits = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(x[i]) & 0x7fffffff;
    peak_bits = bits > peak_bits ? bits : peak_bits;
  }
  const float peak = std::bit_cast<float>(peak_bits), scale = peak / static_cast<float>(limit);
  if (!(scale >= kLeastScale) || std::isinf(peak)) {
    for (std::int64_t i = 0; i < n; ++i) codes[i] = 0;
    return scale < kLeastScale ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = 1.0f / scale;
  // A float of 1.5 * 2^23 and more has no fraction: adding it rounds, and leaves the whole number in the low
  // bits.
  constexpr float kRound = 12582912.0f;
  for (std::int64_t i = 0; i < n; ++i)
    codes[i] = static_cast<std::int16_t>(std::bit_cast<std::int32_t>(x[i] * inverse + kRound));
  return scale;
}

constexpr int kTogether = 4;           // vectors that share one load of weights
constexpr std::int64_t kAhead = 4096;  // bytes; beyond the end of the page, where the machine by itself stops

/// Asks the memory for what will follow one piece of weights.
inline void ask_ahead(const std::int8_t* piece) {
  for (int at = 0; at < kInt8Rows * kInt8Columns; at += 64) __builtin_prefetch(piece + kAhead + at, 0, 3);
}

/// Int8ProductKernels::products by Piece::sums_of<M>(x, w, k, sums), which makes the sums [M][4] of M vectors
/// with four rows of weights. The four rows stay in the first-level cache for all vectors.
template <class Piece>
void products_by(const std::int16_t* x, int vectors, const std::int8_t* w, std::int64_t rows, std::int64_t k,
                 std::int32_t* y) noexcept {
  for (std::int64_t row = 0; row < rows; row += kInt8Rows, w += kInt8Rows * k) {
    const std::int64_t some = rows - row < kInt8Rows ? rows - row : kInt8Rows;
    for (int first = 0; first < vectors; first += kTogether) {
      const int together = vectors - first < kTogether ? vectors - first : kTogether;
      alignas(64) std::int32_t sums[kTogether][kInt8Rows];
      const std::int16_t* const these = x + first * k;
      if (together == 4) Piece::template sums_of<4>(these, w, k, sums);
      if (together == 3) Piece::template sums_of<3>(these, w, k, sums);
      if (together == 2) Piece::template sums_of<2>(these, w, k, sums);
      if (together == 1) Piece::template sums_of<1>(these, w, k, sums);
      for (int m = 0; m < together; ++m)
        for (std::int64_t r = 0; r < some; ++r) y[(first + m) * rows + row + r] = sums[m][r];
    }
  }
}

}  // namespace
}  // namespace lode
