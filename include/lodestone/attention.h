// SPDX-License-Identifier: Apache-2.0
// The partial result of attention and its algebra: attention over a set of keys is (output, log-sum-exp), and
// the states of disjoint sets merge exactly, wherever each was computed.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace lode {

/// Attention of `rows` queries over one set of keys. Natural logarithm. The empty set is (0, -inf).
///   output[r, :] = sum_i exp(s_ri - lse[r]) v_i        lse[r] = log sum_i exp(s_ri)
struct AttentionState {
  float* output = nullptr;  // [rows, d]
  float* lse = nullptr;     // [rows]
  std::int64_t rows = 0;
  std::int64_t d = 0;

  void clear() const;  ///< makes it the empty set
};

/// a := a merged with b, over disjoint sets of keys. Associative and commutative to rounding; callers merge
/// in a fixed order, so results do not depend on who computed what. An empty side changes nothing: exp(-inf -
/// -inf) never occurs.
void merge(AttentionState a, AttentionState b);

}  // namespace lode
