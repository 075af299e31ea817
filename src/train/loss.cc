// SPDX-License-Identifier: Apache-2.0
#include "train/loss.h"

#include <algorithm>
#include <cmath>

#include "lodestone/error.h"

namespace lode {

double kl_divergence(Matrix<const float> logits, Matrix<const float> targets, Matrix<float> gradient) {
  LODE_ASSERT(logits.rows == targets.rows && logits.cols == targets.cols);
  const float weight = 1.0f / static_cast<float>(std::max<std::int64_t>(1, logits.rows));
  double total = 0.0;
  for (std::int64_t row = 0; row < logits.rows; ++row) {
    const std::span<const float> z = logits[row], t = targets[row];
    const float most = *std::max_element(z.begin(), z.end());
    double sum = 0.0, mass = 0.0;
    for (std::size_t i = 0; i < z.size(); ++i) {
      sum += std::exp(z[i] - most);
      mass += t[i];
    }
    const double log_sum = most + std::log(sum);
    for (std::size_t i = 0; i < z.size(); ++i) {
      if (t[i] > 0.0f) total += t[i] * (std::log(static_cast<double>(t[i])) - (z[i] - log_sum));
    }
    if (gradient.data == nullptr) continue;
    const auto share = static_cast<float>(mass / sum);  // mass is 1 but for rounding, or 0
    for (std::size_t i = 0; i < z.size(); ++i)
      gradient[row][i] = weight * (share * std::exp(z[i] - most) - t[i]);
  }
  return total * weight;
}

void softmax_rows(Matrix<float> x) {
  for (std::int64_t row = 0; row < x.rows; ++row) {
    const float most = *std::max_element(x[row].begin(), x[row].end());
    double sum = 0.0;
    for (float& value : x[row]) sum += value = std::exp(value - most);
    const auto inverse = static_cast<float>(1.0 / sum);
    for (float& value : x[row]) value *= inverse;
  }
}

}  // namespace lode
