// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/steps.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "kernels/rope.h"

namespace lode {

std::vector<Position> sample(Position begin, Position end, std::int64_t count, Rng& rng) {
  const std::int64_t n = end - begin;
  std::vector<Position> rows;
  if (count >= n) {
    for (Position p = begin; p < end; ++p) rows.push_back(p);
    return rows;
  }
  std::vector<std::uint64_t> drawn(static_cast<std::size_t>(n / 64 + 1), 0);  // one bit each
  for (std::int64_t found = 0; found < count;) {
    // As many as are missing at a time: some may be drawn already.
    for (std::int64_t missing = count - found; missing > 0; --missing) {
      const std::uint64_t at = rng.below(static_cast<std::uint64_t>(n)), bit = std::uint64_t{1} << (at % 64);
      std::uint64_t& word = drawn[at / 64];
      found += (word & bit) == 0 ? 1 : 0;
      word |= bit;
    }
  }
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    for (std::uint64_t left = drawn[i]; left != 0; left &= left - 1)
      rows.push_back(begin + static_cast<Position>(64 * i) + std::countr_zero(left));
  }
  return rows;
}

HashDraw draw_step(const HashSettings& settings, Position keys_end, Rng& rng) {
  const auto up_to = [&](std::int64_t most) {
    return static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(most) + 1));
  };
  HashDraw draw;
  if (settings.further > 0) {
    draw.shifted = up_to(settings.shift);
    draw.further = rng.uniform() < settings.apart ? up_to(std::min(settings.further, draw.shifted)) : 0;
    draw.shifted -= draw.further;
  }
  const auto sink = static_cast<Position>(settings.dense.sink);
  draw.others = sample(sink, keys_end, settings.others > 0 ? settings.others : keys_end - sink, rng);
  if (settings.further == 0 && settings.shift > 0) draw.shifted = up_to(settings.shift);
  return draw;
}

std::vector<float> angles_of(const Rope& rope, std::int64_t positions) {
  std::vector<float> angles;  // [d/2]
  for (const float frequency : rope.frequencies())
    angles.push_back(
        static_cast<float>(std::fmod(static_cast<double>(positions) * frequency, 2.0 * std::numbers::pi)));
  return angles;
}

std::vector<float> cosines_and_sines(std::span<const float> angles) {
  const std::size_t half = angles.size();
  std::vector<float> turned(2 * half);
  for (std::size_t i = 0; i < half; ++i)
    turned[i] = std::cos(angles[i]), turned[half + i] = std::sin(angles[i]);
  return turned;
}

void turn(std::span<float> rows, std::int64_t stride, std::span<const float> angles) {
  const std::size_t half = angles.size();
  const std::vector<float> turned = cosines_and_sines(angles);
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(stride)) {
    float* const x = rows.data() + at;
    for (std::size_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[half + i];
      x[i] = a * turned[i] - b * turned[half + i];
      x[half + i] = b * turned[i] + a * turned[half + i];
    }
  }
}

}  // namespace lode
