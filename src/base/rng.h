// SPDX-License-Identifier: Apache-2.0
// Seeded random numbers: the same on every machine and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace lode {

/// SplitMix64: one state word, one output word. Independent streams: Rng(hash_seed(seed, layer, head, ...)).
class Rng {
 public:
  explicit constexpr Rng(std::uint64_t seed) : state_(seed) {}

  constexpr std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform in [0, n), n > 0, without modulo bias worth noticing (multiply-shift on 64 bits).
  constexpr std::uint64_t below(std::uint64_t n) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(next()) * n) >> 64);
  }
  /// Uniform in [0, 1).
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Standard normal (Box-Muller, one of the pair).
  double normal() {
    const double u = 1.0 - uniform(), v = uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }

 private:
  std::uint64_t state_;
};

/// The n-th number of Rng(seed), from 0 on, rounded down to a float: uniform in [0, 1).
constexpr float nth_uniform(std::uint64_t seed, std::uint64_t n) {
  return static_cast<float>(Rng(seed + n * 0x9e3779b97f4a7c15ull).next() >> 40) * 0x1p-24f;
}

/// Mixes words into one seed.
template <class... Words>
constexpr std::uint64_t hash_seed(std::uint64_t seed, Words... words) {
  ((seed = Rng(seed ^ (0x632be59bd9b4e019ull * (static_cast<std::uint64_t>(words) + 1))).next()), ...);
  return seed;
}

}  // namespace lode
