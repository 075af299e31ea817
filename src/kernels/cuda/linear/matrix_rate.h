// SPDX-License-Identifier: Apache-2.0
// The yardstick of prefill: how fast the library multiplies matrices on this GPU.
#pragma once

#include <cstdint>

namespace lode::cuda {

/// Operations per second of cuBLASLt's product of two [n, n] matrices of bf16 with float32 sums, the best of
/// ten; 0 without that library.
double matrix_rate(std::int64_t n);

}  // namespace lode::cuda
