// SPDX-License-Identifier: Apache-2.0
// The gated delta rule, for whichever vec_*.h was included before.
//
// A token needs its whole product S^T k before its first change of S, so that a plain loop passes over S twice a token.
// Here one pass ends a token (its change, and S^T q) and begins the next one (its decay, and S^T k): each number of S is
// read and written once a token, and four operations on it bound the time. They are those of the plain loop, in its
// order, so that a call may end at any token: the last pass only ends, the first one only begins.
#pragma once

#include <algorithm>
#include <iterator>

#include "kernels/delta_rule.h"
#include "kernels/kernels.h"

namespace lode {
namespace {

constexpr int kVecs = static_cast<int>(kDeltaColumns) / Vec::kLanes;

/// Nearly always of all columns, a size that the compiler knows.
LODE_INLINE void copy_columns(const float* from, std::int64_t columns, float* to) {
  columns == kDeltaColumns ? std::copy_n(from, kDeltaColumns, to) : std::copy_n(from, columns, to);
}

/// Tokens lie far apart, each on pages of its own, where no processor reads ahead by itself. Of more tokens ahead the
/// first-level cache, which also holds S, cannot keep the rows, since they fall into the same few sets.
constexpr std::int64_t kTokensAhead = 2;

template <bool kWrites = false>
LODE_INLINE void bring_row(const float* p, std::int64_t n) {
  constexpr std::int64_t kLine = 64 / sizeof(float);
  for (std::int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i, kWrites);
}

LODE_INLINE void bring_token(const DeltaCall& c, std::int64_t t) {
  bring_row(c.q + t * c.stride, c.key_dim);
  bring_row(c.k + t * c.stride, c.key_dim);
  bring_row(c.v + t * c.stride, c.columns);
  bring_row<true>(c.o + t * c.o_stride, c.columns);
}

/// Ends token t - 1, whose change of S is k change^T, and begins token t: `change` becomes its one.
template <bool kEnds, bool kBegins>
void delta_pass(const DeltaCall& c, std::int64_t t, float* s /*[key_dim, kDeltaColumns]*/,
                Vec (&change)[kVecs]) {
  if (kBegins && t + kTokensAhead < c.tokens) bring_token(c, t + kTokensAhead);
  const float* const k = kBegins ? c.k + t * c.stride : nullptr;
  const float* const past_k = kEnds ? c.k + (t - 1) * c.stride : nullptr;
  const float* const past_q = kEnds ? c.q + (t - 1) * c.stride : nullptr;
  const Vec decay = set1(kBegins ? c.decay[t * c.gate_stride] : 1.0f);
  Vec had[kVecs], out[kVecs];
  for (int j = 0; j < kVecs; ++j) had[j] = out[j] = set1(0.0f);
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    const Vec past_key = set1(kEnds ? past_k[i] : 0.0f), past_query = set1(kEnds ? past_q[i] : 0.0f),
              key = set1(kBegins ? k[i] : 0.0f);
    for (int j = 0; j < kVecs; ++j) {
      float* const at = s + i * kDeltaColumns + j * Vec::kLanes;
      Vec x = load(at);
      if constexpr (kEnds) {
        x = fma(past_key, change[j], x);
        out[j] = fma(x, past_query, out[j]);
      }
      if constexpr (kBegins) {
        x = x * decay;
        had[j] = fma(x, key, had[j]);
      }
      store(at, x);
    }
  }
  const bool ragged = c.columns != kDeltaColumns;
  alignas(64) float row[kDeltaColumns];
  if constexpr (kEnds) {
    float* const o = c.o + (t - 1) * c.o_stride;
    for (int j = 0; j < kVecs; ++j) store((ragged ? row : o) + j * Vec::kLanes, out[j]);
    if (ragged) std::copy_n(row, c.columns, o);
  }
  if constexpr (kBegins) {
    const float* v = c.v + t * c.stride;
    if (ragged) {
      std::fill(std::copy_n(v, c.columns, row), std::end(row), 0.0f);
      v = row;
    }
    const Vec beta = set1(c.beta[t * c.gate_stride]);
    for (int j = 0; j < kVecs; ++j) change[j] = (load(v + j * Vec::kLanes) - had[j]) * beta;
  }
}

void delta_rule_here(const DeltaCall& c) noexcept {
  alignas(64) float s[kMaxHeadDim * kDeltaColumns];
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    copy_columns(c.before + i * c.state_stride, c.columns, s + i * kDeltaColumns);
    std::fill(s + i * kDeltaColumns + c.columns, s + (i + 1) * kDeltaColumns, 0.0f);
  }
  Vec change[kVecs];
  if (c.tokens > 0) {
    delta_pass<false, true>(c, 0, s, change);
    for (std::int64_t t = 1; t < c.tokens; ++t) delta_pass<true, true>(c, t, s, change);
    delta_pass<true, false>(c, c.tokens, s, change);
  }
  for (std::int64_t i = 0; i < c.key_dim; ++i)
    copy_columns(s + i * kDeltaColumns, c.columns, c.after + i * c.state_stride);
}

}  // namespace
}  // namespace lode
