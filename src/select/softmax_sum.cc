// SPDX-License-Identifier: Apache-2.0
#include "select/softmax_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/exponentials.h"

namespace lode {

void log_softmax(std::span<float> scores) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float peak = -kInfinity;
  for (float& s : scores) {
    if (std::isnan(s)) s = -kInfinity;
    if (s < kInfinity) peak = std::max(peak, s);
  }
  if (!std::isfinite(peak)) return;
  double sum = 0.0;
  for (const float s : scores)
    if (s < kInfinity) sum += std::exp(static_cast<double>(s - peak));
  const float lse = peak + static_cast<float>(std::log(sum));
  for (float& s : scores) s -= lse;
}

void sum_exponentials(Matrix<float> scores) {
  for (std::int64_t i = 0; i < scores.cols; ++i) {
    float sum = 0.0f;
    for (std::int64_t r = 0; r < scores.rows; ++r) sum += std::exp(scores[r][static_cast<std::size_t>(i)]);
    scores[0][static_cast<std::size_t>(i)] = std::log(sum);
  }
}

void sum_softmax(Matrix<float> scores) {
  for (std::int64_t r = 0; r < scores.rows; ++r) {
    float* const row = scores[r].data();
    for (std::int64_t i = 0; i < scores.cols; ++i)
      row[i] = row[i] >= -std::numeric_limits<float>::infinity() ? row[i]
                                                                 : -std::numeric_limits<float>::infinity();
    const double total = exponential_kernels().weigh(row, nullptr, scores.cols);
    const auto share = static_cast<float>(1.0 / total);
    float* const sum = scores[0].data();
    if (r == 0) {
      for (std::int64_t i = 0; i < scores.cols; ++i) sum[i] *= share;
    } else {
      for (std::int64_t i = 0; i < scores.cols; ++i) sum[i] += share * row[i];
    }
  }
}

}  // namespace lode
