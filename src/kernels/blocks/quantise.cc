// SPDX-License-Identifier: Apache-2.0
// K-quants keep scales of groups in six or eight bits of a block's own scale. A group's scale is searched: for
// some roundings of the numbers the best scale follows by least squares, weighted so that large numbers count
// more, and the best of these is taken; then numbers are rounded again by the scale as it is stored.
#include "kernels/blocks/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "kernels/dequantise.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Out = std::uint8_t*;

constexpr int kTries = 21;
/// Scales from 0.9 to 1.1 of the one that just spans the numbers.
float stretch_of(int attempt) {
  return 0.9f + 0.01f * static_cast<float>(attempt);
}

void put_half(float x, Out to) {
  const f16 half = to_f16(x);
  std::memcpy(to, &half.bits, 2);
}
float as_half(float x) {
  return to_float(to_f16(x));
}
int rounded(float x, int low, int high) {
  return static_cast<int>(std::nearbyint(std::clamp(x, static_cast<float>(low), static_cast<float>(high))));
}
float inverse(float x) {
  const float inverse = x == 0 ? 0.0f : 1.0f / x;
  return std::isfinite(inverse) ? inverse : 0.0f;
}
std::uint8_t byte_of(int x) {
  return static_cast<std::uint8_t>(x);
}

template <std::size_t N>
std::array<float, N> weights_of(std::span<const float, N> x) {
  float square = 0;
  for (const float v : x) square += v * v;
  const float usual = std::sqrt(square / static_cast<float>(N));
  std::array<float, N> w;
  for (std::size_t i = 0; i < N; ++i) w[i] = usual + std::abs(x[i]);
  return w;
}

/// Weighted sums of one rounding q of numbers x.
struct Sums {
  float w = 0, q = 0, qq = 0, x = 0, qx = 0;
};

struct Fit {
  float scale = 0, minimum = 0;  ///< x is about scale * q - minimum
};

/// Of codes 0 to `most`, minimum >= 0.
template <std::size_t N>
Fit fit_with_minimum(std::span<const float, N> x, int most) {
  const std::array<float, N> w = weights_of(x);
  const float low = std::min(0.0f, *std::min_element(x.begin(), x.end()));
  const float high = std::max(0.0f, *std::max_element(x.begin(), x.end()));
  Fit best{(high - low) / static_cast<float>(most), -low};
  float least = std::numeric_limits<float>::infinity();
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const float per = stretch_of(attempt) * static_cast<float>(most) * inverse(high - low);
    std::array<float, N> q;
    Sums s;
    for (std::size_t i = 0; i < N; ++i) {
      q[i] = static_cast<float>(rounded(per * (x[i] - low), 0, most));
      s.w += w[i], s.q += w[i] * q[i], s.qq += w[i] * q[i] * q[i];
      s.x += w[i] * x[i], s.qx += w[i] * q[i] * x[i];
    }
    const float determinant = s.w * s.qq - s.q * s.q;
    if (!(determinant > 0)) continue;
    Fit fit{(s.w * s.qx - s.x * s.q) / determinant, -(s.qq * s.x - s.q * s.qx) / determinant};
    if (fit.minimum < 0) fit = {s.qx / s.qq, 0};
    float error = 0;
    for (std::size_t i = 0; i < N; ++i) {
      const float off = fit.scale * q[i] - fit.minimum - x[i];
      error += w[i] * off * off;
    }
    if (error < least && fit.scale > 0) least = error, best = fit;
  }
  return best;
}

/// Of codes -most - 1 to most, no minimum. The sign is such that the largest number gets the most negative code.
template <std::size_t N>
float fit_scale(std::span<const float, N> x, int most) {
  const std::array<float, N> w = weights_of(x);
  const float peak =
      *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
  float best = -peak / static_cast<float>(most + 1), gain = 0;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const float per = -stretch_of(attempt) * static_cast<float>(most + 1) * inverse(peak);
    float qx = 0, qq = 0;
    for (std::size_t i = 0; i < N; ++i) {
      const auto q = static_cast<float>(rounded(per * x[i], -most - 1, most));
      qx += w[i] * q * x[i], qq += w[i] * q * q;
    }
    if (qq > 0 && qx * qx > gain * qq) gain = qx * qx / qq, best = qx / qq;
  }
  return best;
}

void put_q8_0(const float* x, Out to) {
  float peak = 0;
  for (int i = 0; i < 32; ++i) peak = std::max(peak, std::abs(x[i]));
  const float d = peak / 127.0f, per = inverse(d);
  put_half(d, to);
  for (int i = 0; i < 32; ++i) to[2 + i] = byte_of(static_cast<int>(std::round(x[i] * per)));
}

/// Scales and minima of six bits in 12 bytes, as dequantise.cc reads them.
void put_groups(const std::array<int, 8>& scales, const std::array<int, 8>& minima, Out to) {
  for (std::size_t j = 0; j < 4; ++j) {
    to[j] = byte_of(scales[j] | (scales[j + 4] >> 4) << 6);
    to[4 + j] = byte_of(minima[j] | (minima[j + 4] >> 4) << 6);
    to[8 + j] = byte_of((scales[j + 4] & 15) | (minima[j + 4] & 15) << 4);
  }
}

void put_q4_k(const float* x, Out to) {
  constexpr int kMost = 15, kMostScale = 63;
  std::array<Fit, 8> fits;
  float scale = 0, minimum = 0;
  for (std::size_t g = 0; g < 8; ++g) {
    fits[g] = fit_with_minimum(std::span<const float, 32>(x + 32 * g, 32), kMost);
    scale = std::max(scale, fits[g].scale), minimum = std::max(minimum, fits[g].minimum);
  }
  put_half(scale / kMostScale, to);
  put_half(minimum / kMostScale, to + 2);
  const float d = as_half(scale / kMostScale), dmin = as_half(minimum / kMostScale);
  std::array<int, 8> scales, minima;
  std::array<std::uint8_t, 256> codes;
  for (std::size_t g = 0; g < 8; ++g) {
    scales[g] = rounded(fits[g].scale * inverse(d), 0, kMostScale);
    minima[g] = rounded(fits[g].minimum * inverse(dmin), 0, kMostScale);
    const float per = inverse(d * static_cast<float>(scales[g])), off = dmin * static_cast<float>(minima[g]);
    for (std::size_t i = 32 * g; i < 32 * g + 32; ++i)
      codes[i] = byte_of(rounded((x[i] + off) * per, 0, kMost));
  }
  put_groups(scales, minima, to + 4);
  for (std::size_t i = 0; i < 128; ++i) {
    const std::size_t first = i / 32 * 64 + i % 32;
    to[16 + i] = byte_of(codes[first] | codes[first + 32] << 4);
  }
}

void put_q6_k(const float* x, Out to) {
  constexpr int kMost = 31;
  std::array<float, 16> fits;
  for (std::size_t g = 0; g < 16; ++g) fits[g] = fit_scale(std::span<const float, 16>(x + 16 * g, 16), kMost);
  const float peak =
      *std::max_element(fits.begin(), fits.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
  const float d = as_half(-peak / 128);
  put_half(-peak / 128, to + 208);
  std::array<int, 256> codes;
  for (std::size_t g = 0; g < 16; ++g) {
    const int scale = rounded(fits[g] * inverse(d), -128, 127);
    to[192 + g] = byte_of(scale);
    const float per = inverse(d * static_cast<float>(scale));
    for (std::size_t i = 16 * g; i < 16 * g + 16; ++i) codes[i] = rounded(x[i] * per, -kMost - 1, kMost) + 32;
  }
  for (std::size_t i = 0; i < 128; ++i) {
    const std::size_t at = i / 64 * 128 + i % 64;
    to[i] = byte_of((codes[at] & 15) | (codes[at + 64] & 15) << 4);
  }
  for (std::size_t i = 0; i < 64; ++i) {
    const std::size_t at = i / 32 * 128 + i % 32;
    to[128 + i] = byte_of(codes[at] >> 4 | codes[at + 32] >> 4 << 2 | codes[at + 64] >> 4 << 4 |
                          codes[at + 96] >> 4 << 6);
  }
}

void put_plain(WeightType type, const float* from, std::int64_t n, std::byte* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (type == WeightType::f32) std::memcpy(to + 4 * i, from + i, 4);
    const std::uint16_t bits = type == WeightType::f16 ? to_f16(from[i]).bits : to_bf16(from[i]).bits;
    if (type != WeightType::f32) std::memcpy(to + 2 * i, &bits, 2);
  }
}

bool plain_finite(WeightType type, const std::byte* from, std::int64_t n) {
  if (type == WeightType::f32) return true;
  float x;
  for (std::int64_t i = 0; i < n; ++i) {
    dequantise(type, from + 2 * i, 1, &x);
    if (!std::isfinite(x)) return false;
  }
  return true;
}

}  // namespace

bool can_quantise(WeightType type) {
  return is_plain(type) || type == WeightType::q8_0 || type == WeightType::q4_k || type == WeightType::q6_k;
}

bool quantise(WeightType type, const float* from, std::int64_t n, std::byte* to) {
  LODE_ASSERT(can_quantise(type) && n % layout_of(type).block == 0);
  if (!std::all_of(from, from + n, [](float x) { return std::isfinite(x); })) return false;
  if (is_plain(type)) {
    put_plain(type, from, n, to);
    return plain_finite(type, to, n);
  }
  const auto put = type == WeightType::q8_0 ? put_q8_0 : type == WeightType::q4_k ? put_q4_k : put_q6_k;
  const WeightLayout& layout = layout_of(type);
  for (std::int64_t i = 0; i < n; i += layout.block)
    put(from + i, reinterpret_cast<Out>(to + i / layout.block * layout.block_bytes));
  return blocks_finite(type, to, n);
}

}  // namespace lode
