// SPDX-License-Identifier: Apache-2.0
// Frequencies as transformers computes them (modeling_rope_utils): default, linear, dynamic NTK, YaRN,
// Llama 3, LongRoPE. The steps are in float32 in its order: one unit in the last place of a frequency turns a query at
// position 131,072 by a hundredth of a radian, so that results at long contexts are equal only when
// frequencies are.
#include "kernels/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "lodestone/error.h"

namespace lode {

namespace {

/// theta^(2i/d), the inverse of the unscaled frequencies.
std::vector<float> periods(double theta, int d) {
  std::vector<float> p(static_cast<std::size_t>(d / 2));
  for (std::size_t i = 0; i < p.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(d);
    p[i] = static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
  }
  return p;
}

/// Dynamic NTK: a larger base once the context is longer than the model was trained for.
double dynamic_theta(const RopeShape& shape, int d, std::int64_t max_tokens) {
  const RopeScaling& s = shape.scaling;
  const auto original = static_cast<double>(s.original_max_positions);
  const double length = std::max(original, static_cast<double>(max_tokens));
  return shape.theta *
         std::pow(s.factor * length / original - (s.factor - 1), d / (static_cast<double>(d) - 2));
}

/// Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended.
float scale_llama3(const RopeScaling& s, float frequency) {
  const auto original = static_cast<float>(s.original_max_positions);
  const auto factor = static_cast<float>(s.factor);
  const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
  if (wavelength > static_cast<float>(original / s.low_freq_factor)) return frequency / factor;
  if (wavelength < static_cast<float>(original / s.high_freq_factor)) return frequency;
  const float keep = (original / wavelength - static_cast<float>(s.low_freq_factor)) /
                     static_cast<float>(s.high_freq_factor - s.low_freq_factor);
  return (1 - keep) * frequency / factor + keep * frequency;
}

/// YaRN: dimensions that turn often within the original context are kept, slow ones interpolated, a ramp
/// between.
std::vector<float> yarn_frequencies(const RopeShape& shape, int d, const std::vector<float>& p) {
  const RopeScaling& s = shape.scaling;
  const auto dimension_of = [&](double turns) {
    return d * std::log(static_cast<double>(s.original_max_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(shape.theta));
  };
  double low = dimension_of(s.beta_fast), high = dimension_of(s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1.0);
  if (low == high) high += 0.001;
  std::vector<float> f(p.size());
  for (std::size_t i = 0; i < f.size(); ++i) {
    const float ramp = (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float keep = 1 - std::clamp(ramp, 0.0f, 1.0f);
    f[i] = 1 / (static_cast<float>(s.factor) * p[i]) * (1 - keep) + 1 / p[i] * keep;
  }
  return f;
}

double yarn_magnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_scaling(const RopeScaling& s) {
  if (s.attention_factor > 0) return s.attention_factor;
  if (s.mscale > 0 && s.mscale_all_dim > 0)
    return yarn_magnitude(s.factor, s.mscale) / yarn_magnitude(s.factor, s.mscale_all_dim);
  return yarn_magnitude(s.factor, 1.0);
}

/// LongRoPE and rope_freqs: every frequency has a divisor of its own.
std::vector<float> divided_frequencies(const std::vector<float>& p, const std::vector<float>& divisors) {
  LODE_ASSERT(divisors.size() == p.size());
  std::vector<float> f(p.size());
  for (std::size_t i = 0; i < f.size(); ++i) f[i] = 1 / (divisors[i] * p[i]);
  return f;
}

/// Of contexts of any length, also short ones.
double longrope_attention_scaling(const RopeScaling& s) {
  if (s.attention_factor > 0) return s.attention_factor;
  if (s.factor <= 1) return 1.0;
  return std::sqrt(1 + std::log(s.factor) / std::log(static_cast<double>(s.original_max_positions)));
}

/// Turns x [heads, d] by position * frequency and scales it. The angle is a float32 product, as the reference
/// model has it. Sine and cosine are shared by all heads.
void turn(std::span<float> x, std::span<const float> frequencies, std::size_t turning, float position,
          float scaling) {
  const std::size_t half = frequencies.size();
  LODE_ASSERT(x.size() % (2 * half) == 0);
  for (std::size_t i = 0; i < turning; ++i) {
    const float angle = position * frequencies[i];
    const float c = std::cos(angle) * scaling, s = std::sin(angle) * scaling;
    for (std::size_t at = i; at < x.size(); at += 2 * half) {
      const float a = x[at], b = x[at + half];
      x[at] = a * c - b * s;
      x[at + half] = b * c + a * s;
    }
  }
}

constexpr std::array<std::pair<std::string_view, RopeScaling::Kind>, 8> kKinds = {
    {{"default", RopeScaling::Kind::none},
     {"linear", RopeScaling::Kind::linear},
     {"dynamic", RopeScaling::Kind::dynamic},
     {"yarn", RopeScaling::Kind::yarn},
     {"llama3", RopeScaling::Kind::llama3},
     {"longrope", RopeScaling::Kind::longrope},
     {"divisors", RopeScaling::Kind::divisors},
     {"proportional", RopeScaling::Kind::proportional}}};

}  // namespace

std::string_view name_of(RopeScaling::Kind kind) {
  return std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& k) { return k.second == kind; })->first;
}

Rope::Rope(const RopeShape& shape, std::int64_t max_tokens) {
  const RopeScaling& s = shape.scaling;
  const int d = shape.rotary_dim > 0 ? shape.rotary_dim : shape.head_dim;
  LODE_ASSERT(d <= shape.head_dim && d % 2 == 0 && shape.head_dim % 2 == 0);
  const bool dynamic = s.kind == RopeScaling::Kind::dynamic;
  const std::vector<float> p = periods(dynamic ? dynamic_theta(shape, d, max_tokens) : shape.theta, d);
  if (s.kind == RopeScaling::Kind::yarn) {
    frequencies_ = yarn_frequencies(shape, d, p);
    attention_scaling_ = static_cast<float>(yarn_attention_scaling(s));
  } else if (s.kind == RopeScaling::Kind::longrope || s.kind == RopeScaling::Kind::divisors) {
    const bool is_long = s.kind == RopeScaling::Kind::longrope && max_tokens > s.original_max_positions;
    frequencies_ = divided_frequencies(p, is_long ? s.long_divisors : s.short_divisors);
    if (s.kind == RopeScaling::Kind::longrope)
      attention_scaling_ = static_cast<float>(longrope_attention_scaling(s));
  } else {
    for (const float period : p) {
      const float frequency = 1 / period;
      const bool divided = s.kind == RopeScaling::Kind::linear || s.kind == RopeScaling::Kind::proportional;
      frequencies_.push_back(divided                               ? frequency / static_cast<float>(s.factor)
                             : s.kind == RopeScaling::Kind::llama3 ? scale_llama3(s, frequency)
                                                                   : frequency);
    }
  }
  if (s.kind == RopeScaling::Kind::proportional)
    frequencies_.resize(static_cast<std::size_t>(s.share * d / 2 + 1e-6));
  turning_ = frequencies_.size();
  frequencies_.resize(static_cast<std::size_t>(shape.head_dim / 2), 0.0f);
}

Rope Rope::none(int head_dim) {
  Rope rope;
  rope.frequencies_.assign(static_cast<std::size_t>(head_dim / 2), 0.0f);
  return rope;
}

Rope Rope::of(std::span<const float> frequencies, float attention_scaling) {
  Rope rope;
  rope.frequencies_.assign(frequencies.begin(), frequencies.end());
  rope.turning_ = frequencies.size();
  rope.attention_scaling_ = attention_scaling;
  return rope;
}

void Rope::rotate(std::span<float> x, Position position) const {
  turn(x, frequencies_, turning_, static_cast<float>(position), attention_scaling_);
}

void Rope::unrotate(std::span<float> x, Position position) const {
  turn(x, frequencies_, turning_, -static_cast<float>(position), 1.0f / attention_scaling_);
}

}  // namespace lode
