// SPDX-License-Identifier: Apache-2.0
// Which kernels round what they are given.
#pragma once

#include "kernels/kernels.h"

namespace lode::test {

/// Whether decode attention over this type multiplies pairs of bf16: queries and weights have 8 bits then.
inline bool multiplies_pairs(const KernelTable& table, DType type) {
  return type == DType::bf16 && (table.name == "avx512bf16" || table.name == "amx");
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
