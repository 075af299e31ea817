// SPDX-License-Identifier: Apache-2.0
#include "lab/train/adam.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lode {

Adam::Adam(Module& module, const AdamOptions& options) : options_(options) {
  module.visit("", [&](const std::string& name, Parameter& p) {
    const std::vector<float> zero(p.value.size(), 0.0f);
    if (p.trained()) moments_.push_back({name, &p, zero, zero});
  });
}

Adam::Update Adam::count_step(double rate_scale) {
  ++steps_;
  const auto t = static_cast<double>(steps_);
  const double correction =
      std::sqrt(1.0 - std::pow(options_.beta2, t)) / (1.0 - std::pow(options_.beta1, t));
  return {.rate = static_cast<float>(options_.rate * rate_scale * correction),
          .keep = static_cast<float>(1.0 - options_.rate * rate_scale * options_.weight_decay),
          // The paper's epsilon stands beside the corrected second moment.
          .epsilon = static_cast<float>(options_.epsilon * std::sqrt(1.0 - std::pow(options_.beta2, t)))};
}

void Adam::step(double rate_scale) {
  const auto [rate, keep, epsilon] = count_step(rate_scale);
  const auto beta1 = static_cast<float>(options_.beta1), beta2 = static_cast<float>(options_.beta2);
  for (Moments& m : moments_) {
    float* value = m.parameter->value.data();
    const float* gradient = m.parameter->gradient.data();
    float *first = m.first.data(), *second = m.second.data();
    for (std::size_t i = 0; i < m.first.size(); ++i) {
      const float g = gradient[i];
      first[i] = beta1 * first[i] + (1.0f - beta1) * g;
      second[i] = beta2 * second[i] + (1.0f - beta2) * g * g;
      value[i] = keep * value[i] - rate * first[i] / (std::sqrt(second[i]) + epsilon);
    }
  }
}

double cosine_decay(std::int64_t step, std::int64_t steps, double last) {
  const double done =
      steps <= 0 ? 1.0 : std::clamp(static_cast<double>(step) / static_cast<double>(steps), 0.0, 1.0);
  return last + (1.0 - last) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace lode
