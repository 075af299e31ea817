// SPDX-License-Identifier: Apache-2.0
// The algebra of partial attention results.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lodestone/attention.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// A log-sum-exp beyond this is rounded so coarsely that weights relative to it do not add up to 1: at 1e4 outputs would
/// grow or shrink by up to 5e-4, at each merge anew.
constexpr float kLarge = 64.0f;

}  // namespace

void AttentionState::clear() const {
  std::fill_n(output, rows * d, 0.0f);
  std::fill_n(lse, rows, -std::numeric_limits<float>::infinity());
}

void merge(AttentionState a, AttentionState b) {
  LODE_ASSERT(a.rows == b.rows && a.d == b.d);
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (std::int64_t r = 0; r < a.rows; ++r) {
    if (b.lse[r] == kEmpty) continue;
    float* to = a.output + r * a.d;
    const float* from = b.output + r * a.d;
    if (a.lse[r] == kEmpty) {
      std::copy_n(from, a.d, to);
      a.lse[r] = b.lse[r];
      continue;
    }
    // log(e^x + e^y) = max + log1p(e^-|x - y|): the larger side never overflows, the smaller may vanish. NaN
    // on either side stays NaN.
    const float x = a.lse[r], y = b.lse[r];
    const float high = x > y || std::isnan(x) ? x : y;
    const float lse = high + std::log1p(std::exp(-std::abs(x - y)));
    const bool large = std::abs(high) > kLarge;
    float wa = std::exp(x - (large ? high : lse)), wb = std::exp(y - (large ? high : lse));
    if (const float sum = wa + wb; large) wa /= sum, wb /= sum;
    for (std::int64_t c = 0; c < a.d; ++c) to[c] = to[c] * wa + from[c] * wb;
    a.lse[r] = lse;
  }
}

}  // namespace lode
