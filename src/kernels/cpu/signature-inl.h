// SPDX-License-Identifier: Apache-2.0
// What the signature kernels of all instruction sets share, after one vec_*.h.
#pragma once

#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/signature.h"

namespace lode {
namespace {

void silu(float* x, std::int64_t n) noexcept {
  constexpr int kLanes = Vec::kLanes;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    alignas(64) float power[kLanes];
    store(power, exp_of(set1(0.0f) - (count == kLanes ? load(x + i) : load_first(x + i, count))));
    // Below -87 the power may have left the range, and the result is smaller than any normal number.
    for (int lane = 0; lane < count; ++lane) {
      const float a = x[i + lane];
      x[i + lane] = a < -87.0f ? 0.0f : a / (1.0f + power[lane]);
    }
  }
}

/// rows of the set bits of `mask`, each bit standing for `kBitsEach` of them.
template <int kBitsEach>
inline Position* rows_of(std::uint32_t mask, Position first, Position* rows) {
  for (; mask != 0; mask &= mask - 1) *rows++ = first + __builtin_ctz(mask) / kBitsEach;
  return rows;
}

}  // namespace
}  // namespace lode

#define LODE_SIGNATURE_TABLE(table_name)                                                    \
  {                                                                                         \
    .name = table_name, .distances = distances, .least = least, .count_up_to = count_up_to, \
    .collect_up_to = collect_up_to, .silu = silu                                            \
  }
