// SPDX-License-Identifier: Apache-2.0
// Products of a query with int8 keys at scattered rows, in whole numbers: what a walk over a graph of keys
// spends its arithmetic on. One table per instruction set, chosen as kernels() is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/kernels.h"

namespace lode {

/// Keys in int8, a row of whole cache lines each: first the codes, in the last four bytes the scale.
struct CodedRows {
  static constexpr int kLine = 64, kScaleBytes = sizeof(float);
  static constexpr int stride_for(int numbers) { return (numbers + kScaleBytes + kLine - 1) / kLine * kLine; }
  const std::byte* data = nullptr;  // [rows, stride]
  int stride = 0;                   ///< from stride_for
};
inline constexpr int kMostCodes = CodedRows::stride_for(kMaxHeadDim);

/// A query in whole numbers, 0 behind its last one: its largest one is most_coded(numbers), so that it loses less than
/// the keys' 8 bits do, and a product with as many of these fits 32 bits.
struct CodedQuery {
  alignas(64) std::int16_t whole[kMostCodes] = {};
  alignas(64) std::int8_t high[kMostCodes] = {}, low[kMostCodes] = {};  // whole = 256 high + low
  std::size_t numbers = 0;                                              // behind them all is 0
  std::uint32_t offset = 0;  // 128 times the sum of `whole`, modulo 2^32
};
/// What `high` and `low` can hold, and no more than leaves a sum over `numbers` products with codes below 2^31.
constexpr int most_coded(std::int64_t numbers) {
  constexpr std::int64_t kBytes = 127 * 256 + 127, kSum = (std::int64_t{1} << 31) - 1, kCode = 127;
  return static_cast<int>(numbers * kCode * kBytes <= kSum ? kBytes : kSum / (numbers * kCode));
}

/// `q` up to a positive factor, which no ranking sees. All 0 when a number is not finite.
void code_query(std::span<const float> q /*[d]*/, CodedQuery& out);

struct Int8DotKernels {
  std::string_view name;
  /// scores[i] = scale * (q . codes) of the key rows[i], the product exact: the same bits on every machine.
  /// The query has no more numbers than fit beside a scale.
  void (*score)(const CodedQuery& q, const CodedRows& keys, const Position* rows, std::int64_t count,
                float* scores) noexcept;
};

/// The table that goes with kernels().
const Int8DotKernels& int8_dot_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const Int8DotKernels* const> supported_int8_dot_kernels();

}  // namespace lode
