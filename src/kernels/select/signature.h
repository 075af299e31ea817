// SPDX-License-Identifier: Apache-2.0
// Contracts of the kernels over binary signatures: distances of packed words, and the selection among small
// integers that follows them. One table per instruction set, chosen as kernels() is; AVX-512 comes with and
// without VPOPCNTDQ.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lodestone/types.h"

namespace lode {

/// Bit i of a signature is bit i % 32 of its word i / 32, the lowest bit first.
inline constexpr int kMaxSignatureWords = 4;
/// Queries whose distances can be added without leaving 16 bits: 32 heads of 128 bits make 4096.
inline constexpr int kMaxSignatureQueries = 32;

/// All are noexcept, allocate nothing, and give the same integers on every machine.
struct SignatureKernels {
  std::string_view name;

  /// distance[i] = sum over the queries of popcount(key i xor query), added to what is there if `add`.
  /// words: 1, 2 or 4; queries: 0 to kMaxSignatureQueries.
  void (*distances)(const std::uint32_t* keys /*[n, words]*/, std::int64_t n, int words,
                    const std::uint32_t* queries /*[queries, words]*/, int count, bool add,
                    std::uint16_t* distance /*[n]*/) noexcept;
  /// The least of n numbers; 65535 when there are none.
  std::uint16_t (*least)(const std::uint16_t* x, std::int64_t n) noexcept;
  /// How many of n numbers are <= limit.
  std::int64_t (*count_up_to)(const std::uint16_t* x, std::int64_t n, std::uint16_t limit) noexcept;
  /// rows := offset + i for each x[i] <= limit, rising; returns how many. `rows` has room for 16 more than
  /// them, or for n if that is less; what lies behind them is not kept.
  std::int64_t (*collect_up_to)(const std::uint16_t* x, std::int64_t n, std::uint16_t limit, Position offset,
                                Position* rows) noexcept;
  /// x := x / (1 + e^-x), within 4 units in the last place above -87; NaN stays NaN.
  void (*silu)(float* x, std::int64_t n) noexcept;
};

/// The table that goes with kernels().
const SignatureKernels& signature_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const SignatureKernels* const> supported_signature_kernels();

}  // namespace lode
