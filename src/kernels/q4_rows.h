// SPDX-License-Identifier: Apache-2.0
// Rows of keys and values in four bits (DType::q4). A row is turned by a fixed orthogonal matrix H S (Hadamard,
// after signs), which spreads single large channels over all columns and leaves every column nearly normal; each
// 32 columns of the turned row then share a scale, and each number is one of 16 levels, the best ones for a normal
// distribution (Lloyd, Max). Because q . k = (H S q) . (H S k), kernels turn queries instead of keys, and sums of
// values back at the end.
//
//   row = [groups, 16] bytes of codes, [groups] f16 scales         groups = ceil(d / 32); 4.5 bits a number
//   number of column c = scale[c / 32] * kQ4Levels[code of c]
//   code of c: bits 4 (c % 32 / 4) to + 3 of little-endian 32-bit word c % 4 of the group's four
#pragma once

#include <cstddef>

#include "lodestone/types.h"

namespace lode {

inline constexpr float kQ4Levels[16] = {-2.7326f, -2.0690f, -1.6181f, -1.2562f, -0.9424f, -0.6568f,
                                        -0.3881f, -0.1284f, 0.1284f,  0.3881f,  0.6568f,  0.9424f,
                                        1.2562f,  1.6181f,  2.0690f,  2.7326f};

/// x becomes H S x, in place; any d from 1 on: the largest powers of two that fit, one after the other.
void turn_q4(float* x /*[d]*/, int d) noexcept;
/// The inverse.
void turn_back_q4(float* x /*[d]*/, int d) noexcept;
/// Turns and codes a row. One with a NaN or an infinity, or beyond f16's range, is read as NaN.
void narrow_q4(const float* x /*[d]*/, int d, std::byte* row) noexcept;
/// The numbers of a coded row, turned back.
void widen_q4(const std::byte* row, int d, float* x /*[d]*/) noexcept;
/// Whether its scales are finite.
bool is_finite_q4(const std::byte* row, int d) noexcept;

}  // namespace lode
