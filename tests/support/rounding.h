// SPDX-License-Identifier: Apache-2.0
// Which kernels round what they are given.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/kernels.h"

namespace lode::test {

/// Whether decode attention over this type multiplies pairs of bf16: queries and weights have 8 bits then.
inline bool multiplies_pairs(const KernelTable& table, DType type) {
  return type == DType::bf16 && (table.name == "avx512bf16" || table.name == "amx");
}

/// Whether decode attention over this type multiplies whole numbers: queries have 16 bits then, weights 15 or 16.
inline bool multiplies_words(const KernelTable& table, DType type) {
  return type == DType::q8 && table.name != "scalar";
}

/// A query as those kernels round it: to so many steps of its largest number that no sum overflows.
inline void round_to_words(std::span<float> q) {
  float peak = 0.0f;
  for (const float x : q) peak = std::max(peak, std::abs(x));
  const auto most = std::numeric_limits<std::int32_t>::max() / (128 * std::ssize(q));
  const double step = peak / std::min(32639.0, static_cast<double>(most));
  for (float& x : q) x = peak > 0.0f ? static_cast<float>(std::round(x / step) * step) : x;
}

/// Whether attention of several tokens at once, all keys of each, multiplies tiles of bf16.
inline bool multiplies_tiles(const KernelTable& table, DType type) {
  return type != DType::f32 && (table.name == "avx512bf16" || table.name == "amx");
}

/// What outputs of some tokens at once may be away from float64's.
inline double output_tolerance(DType type) {
  return multiplies_tiles(kernels(), type) ? 5e-2 : 2e-5;
}

}  // namespace lode::test
