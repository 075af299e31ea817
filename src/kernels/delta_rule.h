// SPDX-License-Identifier: Apache-2.0
// The gated delta rule over some tokens and some columns of one head's state: S = decay S + k (beta (v - decay S^T k))^T,
// o = S^T q.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lode {

/// Columns of a state that are taken together: of 128 keys they stay in the first-level cache.
inline constexpr std::int64_t kDeltaColumns = 32;

struct DeltaCall {
  const float *q, *k;         // [tokens, key_dim]
  const float* v;             // [tokens, columns]
  std::int64_t stride;        ///< from one token's q, k and v to the next's
  const float *decay, *beta;  // [tokens]
  std::int64_t gate_stride, tokens;
  const float* before;            // [key_dim, columns]
  float* after;                   // the same; not `before` itself
  std::int64_t state_stride;      ///< from one row of a state to the next
  std::int64_t key_dim, columns;  ///< at most kMaxHeadDim, kDeltaColumns
  float* o;                       // [tokens, columns]
  std::int64_t o_stride;
};

/// All are noexcept and allocate nothing. Token by token: bits do not depend on how tokens are cut into calls, nor on
/// which columns come together.
struct DeltaKernels {
  std::string_view name;
  void (*delta_rule)(const DeltaCall& call) noexcept;
};

/// The table that goes with kernels().
const DeltaKernels& delta_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const DeltaKernels* const> supported_delta_kernels();

}  // namespace lode
