// SPDX-License-Identifier: Apache-2.0
// Frequencies as transformers computes them (modeling_rope_utils): default, linear, dynamic NTK, YaRN,
// Llama 3.
#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lodestone/error.h"

namespace lode {

namespace {

std::vector<double> base_frequencies(double theta, int d) {
  std::vector<double> f(static_cast<std::size_t>(d / 2));
  for (int i = 0; i < d / 2; ++i) f[static_cast<std::size_t>(i)] = std::pow(theta, -2.0 * i / d);
  return f;
}

/// Dynamic NTK: a larger base once the context is longer than the model was trained for.
double dynamic_theta(const ModelConfig& c, std::int64_t max_tokens) {
  const RopeScaling& s = c.rope_scaling;
  const auto original = static_cast<double>(s.original_max_positions);
  const double length = std::max(original, static_cast<double>(max_tokens));
  const double d = c.head_dim;
  return c.rope_theta * std::pow(s.factor * length / original - (s.factor - 1), d / (d - 2));
}

/// Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended.
void scale_llama3(const RopeScaling& s, std::vector<double>& f) {
  const auto original = static_cast<double>(s.original_max_positions);
  for (double& frequency : f) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    const double blend =
        (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
    const double keep = std::clamp(blend, 0.0, 1.0);
    frequency = (1 - keep) * frequency / s.factor + keep * frequency;
  }
}

/// YaRN: dimensions that turn often within the original context are kept, slow ones interpolated, a ramp
/// between.
void scale_yarn(const ModelConfig& c, std::vector<double>& f) {
  const RopeScaling& s = c.rope_scaling;
  const auto dimension_of = [&](double turns) {
    return c.head_dim *
           std::log(static_cast<double>(s.original_max_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(c.rope_theta));
  };
  double low = dimension_of(s.beta_fast), high = dimension_of(s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, c.head_dim - 1.0);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < f.size(); ++i) {
    const double interpolate = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    f[i] = f[i] / s.factor * interpolate + f[i] * (1 - interpolate);
  }
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

/// Turns x [heads, d] by position * frequency and scales it. The angle is a float32 product, as the reference
/// model has it. Sine and cosine are shared by all heads.
void turn(std::span<float> x, std::span<const float> frequencies, float position, float scaling) {
  const std::size_t half = frequencies.size();
  LODE_ASSERT(x.size() % (2 * half) == 0);
  for (std::size_t i = 0; i < half; ++i) {
    const float angle = position * frequencies[i];
    const float c = std::cos(angle) * scaling, s = std::sin(angle) * scaling;
    for (std::size_t at = i; at < x.size(); at += 2 * half) {
      const float a = x[at], b = x[at + half];
      x[at] = a * c - b * s;
      x[at + half] = b * c + a * s;
    }
  }
}

}  // namespace

Rope::Rope(const ModelConfig& config, std::int64_t max_tokens) {
  const RopeScaling& s = config.rope_scaling;
  const bool dynamic = s.kind == RopeScaling::Kind::dynamic;
  std::vector<double> f =
      base_frequencies(dynamic ? dynamic_theta(config, max_tokens) : config.rope_theta, config.head_dim);
  if (s.kind == RopeScaling::Kind::linear) {
    for (double& frequency : f) frequency /= s.factor;
  } else if (s.kind == RopeScaling::Kind::llama3) {
    scale_llama3(s, f);
  } else if (s.kind == RopeScaling::Kind::yarn) {
    scale_yarn(config, f);
    attention_scaling_ = static_cast<float>(yarn_attention_scaling(s));
  }
  frequencies_.assign(f.begin(), f.end());
}

void Rope::rotate(std::span<float> x, Position position) const {
  turn(x, frequencies_, static_cast<float>(position), attention_scaling_);
}

void Rope::unrotate(std::span<float> x, Position position) const {
  turn(x, frequencies_, -static_cast<float>(position), 1.0f / attention_scaling_);
}

}  // namespace lode
