// SPDX-License-Identifier: Apache-2.0
// Products of a query with int8 keys at scattered rows, in whole numbers: what a walk over a graph of keys
// spends its arithmetic on. One table per instruction set, chosen as kernels() is.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/kernels.h"
#include "lodestone/kv_view.h"

namespace lode {

/// A query in whole numbers: its largest one is kMostCoded, so that it loses less than the keys' 8 bits do,
/// and a product with kMaxHeadDim of these fits 32 bits.
struct CodedQuery {
  alignas(64) std::int16_t whole[kMaxHeadDim] = {};
  alignas(64) std::int8_t high[kMaxHeadDim] = {}, low[kMaxHeadDim] = {};  // whole = 256 high + low
  std::uint32_t offset = 0;  // 128 times the sum of `whole`, modulo 2^32
};
inline constexpr int kMostCoded = 127 * 256 + 127;

/// `q` up to a positive factor, which no ranking sees. All 0 when a number is not finite.
void code_query(std::span<const float> q /*[d]*/, CodedQuery& out);

struct CodedDotKernels {
  std::string_view name;
  /// scores[i] = k_scale[rows[i]] * (q . k[rows[i]]), the product exact: the same bits on every machine.
  /// keys: q8, K only. Reads no row's bytes beyond its end.
  void (*score)(const CodedQuery& q, const KvRows& keys, const Position* rows, std::int64_t count,
                float* scores) noexcept;
};

/// The table that goes with kernels().
const CodedDotKernels& coded_dot_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const CodedDotKernels* const> supported_coded_dot_kernels();

}  // namespace lode
