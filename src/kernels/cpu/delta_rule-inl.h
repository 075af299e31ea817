// SPDX-License-Identifier: Apache-2.0
// The gated delta rule, for whichever vec_*.h was included before.
#pragma once

#include <algorithm>

#include "kernels/delta_rule.h"
#include "kernels/kernels.h"

namespace lode {
namespace {

constexpr int kVecs = static_cast<int>(kDeltaColumns) / Vec::kLanes;

/// Columns behind call.columns are zero and stay so.
void delta_step(const DeltaCall& c, std::int64_t t, float* s /*[key_dim, kDeltaColumns]*/) {
  const float *const q = c.q + t * c.stride, *const k = c.k + t * c.stride, *const v = c.v + t * c.stride;
  const Vec decay = set1(c.decay[t * c.gate_stride]);
  Vec held[kVecs], out[kVecs];
  for (int j = 0; j < kVecs; ++j) held[j] = out[j] = set1(0.0f);
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    const Vec key = set1(k[i]);
    for (int j = 0; j < kVecs; ++j) {
      float* const at = s + i * kDeltaColumns + j * Vec::kLanes;
      const Vec x = load(at) * decay;
      store(at, x);
      held[j] = fma(x, key, held[j]);
    }
  }
  alignas(64) float wanted[kDeltaColumns], had[kDeltaColumns];
  for (int j = 0; j < kVecs; ++j) store(had + j * Vec::kLanes, held[j]);
  const float beta = c.beta[t * c.gate_stride];
  for (std::int64_t j = 0; j < kDeltaColumns; ++j) wanted[j] = j < c.columns ? (v[j] - had[j]) * beta : 0.0f;
  for (int j = 0; j < kVecs; ++j) held[j] = load(wanted + j * Vec::kLanes);
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    const Vec key = set1(k[i]), query = set1(q[i]);
    for (int j = 0; j < kVecs; ++j) {
      float* const at = s + i * kDeltaColumns + j * Vec::kLanes;
      const Vec x = fma(key, held[j], load(at));
      store(at, x);
      out[j] = fma(x, query, out[j]);
    }
  }
  for (int j = 0; j < kVecs; ++j) store(had + j * Vec::kLanes, out[j]);
  std::copy_n(had, c.columns, c.o + t * c.o_stride);
}

void delta_rule_here(const DeltaCall& c) noexcept {
  alignas(64) float s[kMaxHeadDim * kDeltaColumns];
  for (std::int64_t i = 0; i < c.key_dim; ++i) {
    std::fill_n(s + i * kDeltaColumns, kDeltaColumns, 0.0f);
    std::copy_n(c.before + i * c.state_stride, c.columns, s + i * kDeltaColumns);
  }
  for (std::int64_t t = 0; t < c.tokens; ++t) delta_step(c, t, s);
  for (std::int64_t i = 0; i < c.key_dim; ++i)
    std::copy_n(s + i * kDeltaColumns, c.columns, c.after + i * c.state_stride);
}

}  // namespace
}  // namespace lode
