// SPDX-License-Identifier: Apache-2.0
// Sums of softmax weights against float64, with scores that are no numbers.
#include "select/shared/softmax_sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_scores(std::uint64_t seed, std::int64_t n) {
  Rng rng(seed);
  std::vector<float> scores(static_cast<std::size_t>(n));
  for (float& s : scores) s = 4.0f * static_cast<float>(rng.normal());
  return scores;
}

/// exp of finite scores over their sum; `infinite` says who else has weight.
std::vector<double> plain(const std::vector<float>& scores) {
  std::vector<double> weights;
  double peak = -std::numeric_limits<double>::infinity(), sum = 0;
  for (const float s : scores)
    if (!std::isnan(s)) peak = std::max(peak, static_cast<double>(s));
  for (const float s : scores) {
    const bool equal = std::isinf(peak) ? peak > 0 && s == kInf : false;
    weights.push_back(std::isnan(s) ? 0.0 : std::isinf(peak) ? (equal ? 1.0 : 0.0) : std::exp(s - peak));
    sum += weights.back();
  }
  for (double& w : weights) w = sum > 0 ? w / sum : 0.0;
  return weights;
}

TEST(AddSoftmax, AddsWeightsOfWhatIsNumbers) {
  for (const std::int64_t n : {1, 7, 16, 1025, 4099}) {
    for (int kind = 0; kind < 5; ++kind) {
      std::vector<float> scores = random_scores(static_cast<std::uint64_t>(n), n);
      const auto last = static_cast<std::size_t>(n - 1);
      if (kind == 1) scores[last] = kNan;
      if (kind == 2) scores[0] = scores[last] = kInf;
      if (kind == 3) scores[last / 2] = -kInf;
      if (kind == 4) std::fill(scores.begin(), scores.end(), n % 2 == 0 ? kNan : -kInf);
      const std::vector<double> expected = plain(scores);
      std::vector<float> sum(static_cast<std::size_t>(n), 0.25f);
      add_softmax(sum, scores);
      for (std::size_t i = 0; i < sum.size(); ++i)
        ASSERT_NEAR(sum[i], 0.25 + expected[i], 2e-6) << kind << " " << i;
    }
  }
}

TEST(AddSoftmax, OfTheFirstKeysAsManyAsThereAreSums) {
  std::vector<float> scores = random_scores(3, 100), sum(60, 0.0f);
  const std::vector<double> expected = plain(scores);
  add_softmax(sum, scores);
  for (std::size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], expected[i], 1e-6);
}

TEST(SumSoftmax, IsTheSumOfItsRows) {
  std::vector<float> rows;
  std::vector<double> expected(50, 0.0);
  for (int r = 0; r < 4; ++r) {
    std::vector<float> row = random_scores(static_cast<std::uint64_t>(r), 50);
    if (r == 0) row[7] = kNan;
    if (r == 2) std::fill(row.begin(), row.end(), -kInf);
    const std::vector<double> weights = plain(row);
    for (std::size_t i = 0; i < 50; ++i) expected[i] += weights[i];
    rows.insert(rows.end(), row.begin(), row.end());
  }
  sum_softmax({rows.data(), 4, 50});
  for (std::size_t i = 0; i < 50; ++i) EXPECT_NEAR(rows[i], expected[i], 2e-6);
}

}  // namespace
}  // namespace lode
