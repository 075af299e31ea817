// SPDX-License-Identifier: Apache-2.0
// The exponential of a vector, over whichever vec_*.h was included before.
#pragma once

namespace lode {
namespace {

/// e^a for a <= 88, within 2 units in the last place; 0 below -87.33 (denormal results are flushed), NaN
/// stays NaN.
LODE_INLINE Vec exp_of(Vec a) {
  // e^a = 2^n e^r with |r| <= ln 2 / 2; n ln 2 is subtracted in two parts, so that r keeps its low bits.
  const Vec n = round_nearest(a * set1(1.44269504089f));
  const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), a));
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, r * r, r + set1(1.0f));
  return zero_below(a, set1(-87.33f), y * pow2(n));
}

}  // namespace
}  // namespace lode
