// SPDX-License-Identifier: Apache-2.0
#include "kernels/q4_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lode {

namespace {

constexpr int kGroup = kQ4Group, kMostPiece = 512;

/// Without signs a row whose numbers are alike would end in one column. A hash, for any regular pattern of signs
/// would only say which other rows do.
constexpr float sign_of(int column) {
  return (static_cast<std::uint32_t>(column + 1) * 0x9e3779b1u) >> 31 != 0 ? -1.0f : 1.0f;
}

/// x = H x, not scaled; constant bounds, so that the compiler makes vectors of them.
template <int N>
void hadamard(float* x) {
  if constexpr (N > 1) {
    constexpr int kHalf = N / 2;
    for (int i = 0; i < kHalf; ++i) {
      const float a = x[i], b = x[i + kHalf];
      x[i] = a + b;
      x[i + kHalf] = a - b;
    }
    hadamard<kHalf>(x);
    hadamard<kHalf>(x + kHalf);
  }
}

template <int N = kMostPiece>
void hadamard_of(int n, float* x) {
  if (n == N) return hadamard<N>(x);
  if constexpr (N > 1) hadamard_of<N / 2>(n, x);
}

/// Calls piece(begin, length) for the powers of two that make up d.
template <class Piece>
void for_pieces(int d, Piece piece) {
  for (int at = 0, n = 0; at < d; at += n) {
    n = std::min(kMostPiece, static_cast<int>(std::bit_floor(static_cast<unsigned>(d - at))));
    piece(at, n);
  }
}

/// Halfway between levels, the positive ones.
constexpr float border(int i) {
  return 0.5f * (kQ4Levels[8 + i] + kQ4Levels[9 + i]);
}

/// One way to code a group: with unit s, and what is gained by it.
struct Coding {
  std::uint8_t level[kGroup];  // of the magnitude, 0 to 7
  float scale = 0.0f, gain = 0.0f;
};

/// The nearest levels of x / unit, and the scale that then errs least: sum x z / sum z^2 with z the levels.
Coding coding_of(const float (&magnitude)[kGroup], int n, float unit) {
  Coding coding;
  float level[kGroup], steps[kGroup];
  const float inverse = 1.0f / unit;
  for (int i = 0; i < kGroup; ++i) level[i] = kQ4Levels[8], steps[i] = 0.0f;
  for (int step = 0; step < 7; ++step) {
    const float above = border(step), more = kQ4Levels[9 + step] - kQ4Levels[8 + step];
    for (int i = 0; i < kGroup; ++i) {
      const float passed = magnitude[i] * inverse > above ? 1.0f : 0.0f;
      level[i] += passed * more;
      steps[i] += passed;
    }
  }
  float product = 0.0f, square = 0.0f;
  for (int i = 0; i < n; ++i) product += magnitude[i] * level[i], square += level[i] * level[i];
  for (int i = 0; i < kGroup; ++i) coding.level[i] = static_cast<std::uint8_t>(steps[i]);
  coding.scale = product / square;
  coding.gain = product * coding.scale;  // of the squared norm
  return coding;
}

/// Codes n numbers; false if the scale is no finite f16.
bool code_group(const float* x, int n, std::byte* codes, f16& scale) {
  float magnitude[kGroup] = {}, peak = 0.0f, square = 0.0f;
  for (int i = 0; i < n; ++i) magnitude[i] = std::fabs(x[i]), square += x[i] * x[i];
  for (int i = 0; i < n; ++i) peak = std::max(peak, magnitude[i]);
  if (!std::isfinite(square)) return false;
  const float spread = std::sqrt(square / static_cast<float>(n));
  std::memset(codes, 0, kGroup / 2);
  scale = {};
  if (!std::isnormal(spread)) return true;  // all zero, or so near that no f16 says otherwise
  Coding best = coding_of(magnitude, n, peak / kQ4Levels[15]);
  for (const float factor : {0.92f, 1.06f}) {
    const Coding other = coding_of(magnitude, n, factor * spread);
    if (other.gain > best.gain) best = other;
  }
  scale = to_f16(best.scale);
  for (int i = 0; i < n; ++i) {
    const unsigned code = x[i] < 0.0f ? 7u - best.level[i] : 8u + best.level[i];
    const int nibble = i / 4;
    codes[i % 4 * 4 + nibble / 2] |= static_cast<std::byte>(code << (nibble % 2 * 4));
  }
  return std::isfinite(to_float(scale));
}

int groups_of(int d) {
  return (d + kGroup - 1) / kGroup;
}

}  // namespace

void turn_q4(float* x, int d) noexcept {
  for_pieces(d, [&](int begin, int n) {
    const float norm = 1.0f / std::sqrt(static_cast<float>(n));
    for (int i = begin; i < begin + n; ++i) x[i] *= norm * sign_of(i);
    hadamard_of(n, x + begin);
  });
}

void turn_back_q4(float* x, int d) noexcept {
  for_pieces(d, [&](int begin, int n) {
    const float norm = 1.0f / std::sqrt(static_cast<float>(n));
    hadamard_of(n, x + begin);
    for (int i = begin; i < begin + n; ++i) x[i] *= norm * sign_of(i);
  });
}

void narrow_q4(const float* x, int d, std::byte* row) noexcept {
  constexpr int kPiece = 1024;  // more than any head has
  float turned[kPiece];
  const int groups = groups_of(d);
  std::byte* const scales = row + groups * kGroup / 2;
  bool finite = d <= kPiece;
  if (finite) {
    std::copy_n(x, d, turned);
    turn_q4(turned, d);
  }
  for (int g = 0; g < groups; ++g) {
    f16 scale;
    finite = finite &&
             code_group(turned + g * kGroup, std::min(kGroup, d - g * kGroup), row + g * kGroup / 2, scale);
    std::memcpy(scales + 2 * g, &scale, 2);
  }
  if (finite) return;
  std::memset(row, 0, static_cast<std::size_t>(groups) * kGroup / 2);
  const f16 none{0x7e00};
  for (int g = 0; g < groups; ++g) std::memcpy(scales + 2 * g, &none, 2);
}

void widen_q4(const std::byte* row, int d, float* x) noexcept {
  const int groups = groups_of(d);
  const std::byte* const scales = row + groups * kGroup / 2;
  for (int g = 0; g < groups; ++g) {
    f16 stored;
    std::memcpy(&stored, scales + 2 * g, 2);
    const float scale = to_float(stored);
    const std::byte* const codes = row + g * kGroup / 2;
    float numbers[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const int nibble = i / 4;
      numbers[i] =
          scale *
          kQ4Levels[std::to_integer<unsigned>(codes[i % 4 * 4 + nibble / 2]) >> (nibble % 2 * 4) & 15u];
    }
    std::copy_n(numbers, std::min(kGroup, d - g * kGroup), x + g * kGroup);
  }
  turn_back_q4(x, d);
}

bool is_finite_q4(const std::byte* row, int d) noexcept {
  for (int g = 0; g < groups_of(d); ++g) {
    f16 scale;
    std::memcpy(&scale, row + groups_of(d) * kGroup / 2 + 2 * g, 2);
    if ((scale.bits & 0x7c00u) == 0x7c00u) return false;
  }
  return true;
}

}  // namespace lode
