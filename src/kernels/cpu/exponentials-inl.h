// SPDX-License-Identifier: Apache-2.0
// The softmax over a row of scores, for whichever vec_*.h was included before.
#pragma once

#include <algorithm>

#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/exponentials.h"

namespace lode {
namespace {

constexpr float kLargestScore = 1e30f;  // infinities would leave no weight to compare

bool has_nan(const float* z, std::int64_t n) {
  int bad = 0;
  for (std::int64_t i = 0; i < n; ++i) bad |= z[i] != z[i] ? 1 : 0;
  return bad != 0;
}

float largest(const float* z, std::int64_t n) {
  constexpr int kLanes = Vec::kLanes;
  Vec high = set1(-kLargestScore), other = high;  // one would wait for itself
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    high = max_passing_nan(high, load(z + i));
    other = max_passing_nan(other, load(z + i + kLanes));
  }
  alignas(64) float lanes[kLanes];
  store(lanes, max_passing_nan(high, other));
  float peak = *std::max_element(lanes, lanes + kLanes);
  for (; i < n; ++i) peak = std::max(peak, z[i]);
  return std::min(peak, kLargestScore);
}

double weigh(float* z, const std::int32_t* weights, std::int64_t n) noexcept {
  constexpr int kLanes = Vec::kLanes, kBlock = 1024;
  if (has_nan(z, n)) return 0.0;
  const Vec peak = set1(largest(z, n)), low = set1(-kLargestScore), high = set1(kLargestScore);
  double total = 0.0;
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const std::int64_t end = std::min(n, at + kBlock);
    Vec sum = set1(0.0f);
    for (std::int64_t i = at; i < end; i += kLanes) {
      const int some = static_cast<int>(std::min<std::int64_t>(kLanes, end - i));
      alignas(64) float last[kLanes], factors[kLanes] = {};
      for (int j = 0; some < kLanes && j < kLanes; ++j) last[j] = j < some ? z[i + j] : -kLargestScore;
      for (int j = 0; j < some; ++j) factors[j] = weights ? static_cast<float>(weights[i + j]) : 1.0f;
      const Vec x = max_passing_nan(low, load(some == kLanes ? z + i : last));
      const Vec e = exp_of(where_above(x, high, high, x) - peak);
      sum = fma(e, load(factors), sum);
      store_first(z + i, e, some);
    }
    alignas(64) float lanes[kLanes];
    store(lanes, sum);
    for (const float lane : lanes) total += lane;
  }
  return total;
}

}  // namespace
}  // namespace lode
