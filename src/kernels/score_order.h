// SPDX-License-Identifier: Apache-2.0
// Scores as whole numbers, so that a score and what it belongs to are one number to compare.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace lode {

/// Unsigned numbers in the order of the floats; NaN sorts with -inf, below every number. Takes no branch on the sign,
/// which would be foreseen as a coin is.
inline std::uint32_t ordered(float score) {
  const auto u = std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 and 0 are one number
  const std::uint32_t order = u ^ ((0u - (u >> 31)) | 0x80000000u);
  return score > -std::numeric_limits<float>::infinity() ? order : 0;
}
/// The score of such a number; -inf for 0.
inline float score_of(std::uint32_t order) {
  if (order == 0) return -std::numeric_limits<float>::infinity();
  return std::bit_cast<float>(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

}  // namespace lode
