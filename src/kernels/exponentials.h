// SPDX-License-Identifier: Apache-2.0
// Contract of the softmax over a plain row of scores, as methods take it over centroids and buckets. One
// table per instruction set, chosen as kernels() is.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lode {

struct ExponentialKernels {
  std::string_view name;

  /// z := exp(z - max z) of n scores, of which those beyond +-1e30 count as that, and returns sum_i
  /// weights[i] z[i] (weights null: of ones). 0, and z untouched, when z holds a NaN. Each within 2 units in
  /// the last place, 0 below e^-87; the sum is in double over blocks of 1024. Noexcept, allocates nothing.
  double (*weigh)(float* z, const std::int32_t* weights, std::int64_t n) noexcept;
};

/// The table that goes with kernels().
const ExponentialKernels& exponential_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const ExponentialKernels* const> supported_exponential_kernels();

}  // namespace lode
