// SPDX-License-Identifier: Apache-2.0
// Contracts of the kernels that multiply weights of 8 bits with vectors of 16-bit numbers. One table of
// functions per instruction set, chosen as kernels() is; AVX-512 comes with and without VNNI.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lode {

/// Weights lie in pieces of so many columns of so many rows, so that memory is read in one line from end to
/// end; what is missing to whole pieces is 0.
inline constexpr std::int64_t kInt8Columns = 32, kInt8Rows = 4;
/// Vectors of one call.
inline constexpr int kMostInt8Vectors = 32;

/// All are noexcept, allocate nothing, and give the same bits on every machine.
struct Int8ProductKernels {
  std::string_view name;

  /// codes[i] = x[i] / s to the nearest whole number, ties to even, with s = max |x| / limit, which is
  /// returned. All codes are 0 when s is 0 or hardly above (below 1e-33), and the result 0; or NaN when a
  /// number is not finite. 1 <= limit <= 32767.
  float (*encode)(const float* x, std::int64_t n, int limit, std::int16_t* codes) noexcept;
  /// y[m * rows + r] = sum_k x[m, k] w[r, k]; sums must fit 32 bits. k is a multiple of kInt8Columns, 1 <=
  /// vectors <= kMostInt8Vectors.
  void (*products)(const std::int16_t* x /*[vectors, k]*/, int vectors,
                   const std::int8_t* w /*[ceil(rows / 4), k / 32, 4, 32]*/, std::int64_t rows,
                   std::int64_t k, std::int32_t* y /*[vectors, rows]*/) noexcept;
};

/// The table that goes with kernels().
const Int8ProductKernels& int8_product_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const Int8ProductKernels* const> supported_int8_product_kernels();

}  // namespace lode
