// SPDX-License-Identifier: Apache-2.0
// Contracts of the kernels that add up table entries which packed codes name: the scores of product
// quantisation, of quantised channels and of quantised bounds. One table of functions per instruction set,
// chosen as kernels() is.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lodestone/types.h"

namespace lode {

/// Keys whose codes lie together; key i is in block i / kPackedBlock.
inline constexpr std::int64_t kPackedBlock = 128;

/// All are noexcept, allocate nothing, add the parts in rising order in float32, and so give the same bits on
/// every machine. `scores` has room for whole blocks.
struct PackedSumKernels {
  std::string_view name;

  /// scores[q * stride + i] = sum_p tables[q, p, code of key i in part p], for codes of 4 bits: of key i in
  /// its block, the bits from 4 * (i / 16) on of word i % 16.
  void (*sum_nibbles)(const float* tables /*[queries, parts, 16]*/, int queries, int parts,
                      const std::uint32_t* codes /*[blocks, parts, 16]*/, std::int64_t blocks,
                      float* scores /*[queries, stride]*/, std::int64_t stride) noexcept;
  /// The same for codes of a byte.
  void (*sum_bytes)(const float* tables /*[queries, parts, 256]*/, int queries, int parts,
                    const std::uint8_t* codes /*[blocks, parts, 128]*/, std::int64_t blocks,
                    float* scores /*[queries, stride]*/, std::int64_t stride) noexcept;
};

/// The table that goes with kernels().
const PackedSumKernels& packed_sum_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const PackedSumKernels* const> supported_packed_sum_kernels();

}  // namespace lode
