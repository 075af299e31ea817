// SPDX-License-Identifier: Apache-2.0
// Contract of the search for the few scores that are large enough. One table per instruction set, chosen as
// kernels() is.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lode {

/// All are noexcept, allocate nothing, and give the same on every machine.
struct FilterAboveKernels {
  std::string_view name;

  /// places := i for each of n scores that is not below `least` (a NaN is not), rising; returns how many.
  /// `places` has room for 16 more than them, or for n if that is less; what lies behind them is not kept.
  std::int64_t (*collect)(const float* scores, std::int64_t n, float least, std::int32_t* places) noexcept;
};

/// The table that goes with kernels().
const FilterAboveKernels& filter_above_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const FilterAboveKernels* const> supported_filter_above_kernels();

}  // namespace lode
