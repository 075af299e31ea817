// SPDX-License-Identifier: Apache-2.0
// Whether numbers are numbers.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace lode {

/// Without a branch, so that the compiler takes many at a time: a step looks through as many logits as the vocabulary has.
inline bool all_finite(std::span<const float> numbers) {
  constexpr std::uint32_t kExponent = 0x7f800000u;  // all its bits: infinite, or no number
  std::uint32_t broken = 0;
  for (const float x : numbers)
    broken |= (std::bit_cast<std::uint32_t>(x) & kExponent) == kExponent ? 1u : 0u;
  return broken == 0;
}

}  // namespace lode
