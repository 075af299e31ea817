// SPDX-License-Identifier: Apache-2.0
#include "select/shared/softmax_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/exponentials.h"

namespace lode {

namespace {

/// row := exp(row - max row), NaN as -inf. Returns what makes softmax weights of it: 0 where there are none.
float weigh(std::span<float> row) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  int some = 0;
  for (float& s : row) {
    s = s >= -kInfinity ? s : -kInfinity;
    some |= s > -kInfinity ? 1 : 0;
  }
  const double total = exponential_kernels().weigh(row.data(), nullptr, std::ssize(row));
  return some != 0 ? static_cast<float>(1.0 / total) : 0.0f;
}

}  // namespace

void add_softmax(std::span<float> sum, std::span<float> scores) {
  const float share = weigh(scores);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += share * scores[i];
}

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
  const std::span<float> sum = scores[0];
  const float share = weigh(sum);
  for (float& weight : sum) weight *= share;
  for (std::int64_t r = 1; r < scores.rows; ++r) add_softmax(sum, scores[r]);
}

}  // namespace lode
