// SPDX-License-Identifier: Apache-2.0
// The softmax over a row of scores, of every instruction set, against float64 and on numbers chosen to hurt.
#include "kernels/exponentials.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Exponentials, AreThoseOfFloat64OfAnyLength) {
  for (const ExponentialKernels* table : supported_exponential_kernels()) {
    for (const std::int64_t n : {1, 3, 15, 16, 17, 31, 33, 1000, 1023, 1024, 1025, 5000}) {
      Rng rng(static_cast<std::uint64_t>(n));
      std::vector<float> z(static_cast<std::size_t>(n) + 1, 7.0f);  // one more, which must stay
      std::vector<std::int32_t> keys(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < keys.size(); ++i) {
        z[i] = static_cast<float>(rng.uniform() * 40 - 60);
        keys[i] = static_cast<std::int32_t>(rng.below(100));
      }
      const std::vector<float> from = z;
      const double peak = *std::max_element(from.begin(), from.begin() + n);
      std::vector<float> alone = z;
      const double total = table->weigh(z.data(), keys.data(), n),
                   ones = table->weigh(alone.data(), nullptr, n);
      double expected = 0, expected_ones = 0;
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const double e = std::exp(static_cast<double>(from[i]) - peak);
        // The distance from the peak is rounded to float32, which the exponential makes relative.
        const double rounding = 1e-6 + 6e-8 * (peak - from[i]);
        EXPECT_NEAR(z[i], e, rounding * e) << table->name << " " << n << " " << i;
        EXPECT_EQ(alone[i], z[i]);
        expected += keys[i] * e, expected_ones += e;
      }
      EXPECT_NEAR(total, expected, 1e-6 * expected) << table->name << " " << n;
      EXPECT_NEAR(ones, expected_ones, 1e-6 * expected_ones) << table->name << " " << n;
      EXPECT_EQ(z.back(), 7.0f);
    }
  }
}

TEST(Exponentials, InfiniteAndFarScoresHaveTheirLimits) {
  for (const ExponentialKernels* table : supported_exponential_kernels()) {
    std::vector<float> z = {0.0f, -kInfinity, -100.0f, 3e38f, -3e38f, kInfinity, 1.0f};
    EXPECT_EQ(table->weigh(z.data(), nullptr, std::ssize(z)), 2.0) << table->name;
    EXPECT_EQ(z, (std::vector<float>{0, 0, 0, 1, 0, 1, 0})) << table->name;
    z.assign(20, -kInfinity);
    EXPECT_EQ(table->weigh(z.data(), nullptr, std::ssize(z)), 20.0) << table->name;
    z.assign(37, 5.0f);
    EXPECT_EQ(table->weigh(z.data(), nullptr, std::ssize(z)), 37.0) << table->name;
    EXPECT_EQ(table->weigh(z.data(), nullptr, 0), 0.0) << table->name;
  }
}

TEST(Exponentials, ANanAnywhereLeavesEverythingAsItIs) {
  for (const ExponentialKernels* table : supported_exponential_kernels()) {
    for (std::size_t at = 0; at < 40; ++at) {
      std::vector<float> z(40);
      std::iota(z.begin(), z.end(), -20.0f);
      z[at] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_EQ(table->weigh(z.data(), nullptr, std::ssize(z)), 0.0) << table->name << " " << at;
      for (std::size_t i = 0; i < z.size(); ++i) {
        if (i == at) continue;
        EXPECT_EQ(z[i], static_cast<float>(i) - 20.0f);
      }
    }
  }
}

}  // namespace
}  // namespace lode
