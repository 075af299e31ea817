// SPDX-License-Identifier: Apache-2.0
// What stored weights of any type stand for, in float32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/weight_type.h"

namespace lode {

/// The numbers that `n` stored ones stand for, n a whole number of blocks: the very bits of GGUF's reference
/// reader. `from` may lie at any address.
void dequantise(WeightType type, const std::byte* from, std::int64_t n, float* to) noexcept;
/// Where in a block of a type its one or two f16 scales lie, the scale first; -1: there is none.
std::array<int, 2> scale_places(WeightType type);
/// Whether all the scales of so many numbers in blocks are finite, and with them the numbers.
bool blocks_finite(WeightType type, const std::byte* from, std::int64_t n) noexcept;

}  // namespace lode
