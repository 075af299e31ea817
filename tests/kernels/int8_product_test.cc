// SPDX-License-Identifier: Apache-2.0
// 8-bit products: every table rounds vectors as said and gives the exact whole numbers.
#include "kernels/int8_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

class Int8Products : public testing::TestWithParam<const Int8ProductKernels*> {};
INSTANTIATE_TEST_SUITE_P(Kernels, Int8Products, testing::ValuesIn(supported_int8_product_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(Int8Products, SumsAreExact) {
  for (const std::int64_t k : {0, 32, 64, 1024}) {
    for (const std::int64_t rows : {0, 1, 2, 3, 4, 7, 33}) {
      for (const int vectors : {1, 2, 3, 4, 5, 8, kMostInt8Vectors}) {
        Rng rng(static_cast<std::uint64_t>(k + rows + vectors));
        // As large as sums of 1024 allow, with the extremes among them; not aligned.
        std::vector<std::int16_t> x(static_cast<std::size_t>(vectors * k + 1));
        std::vector<std::int8_t> w(static_cast<std::size_t>((rows + 3) / 4 * 4 * k + 1));
        for (std::int16_t& v : x) v = static_cast<std::int16_t>(static_cast<int>(rng.below(33025)) - 16512);
        for (std::int8_t& v : w) v = static_cast<std::int8_t>(static_cast<int>(rng.below(255)) - 127);
        const auto weight = [&](std::int64_t r, std::int64_t i) -> std::int8_t& {
          return w[static_cast<std::size_t>(((r / 4 * (k / 32) + i / 32) * 4 + r % 4) * 32 + i % 32 + 1)];
        };
        for (std::int64_t i = 0; i < k && rows > 0; ++i)
          x[static_cast<std::size_t>(i + 1)] = 16512, weight(0, i) = 127;
        std::vector<std::int32_t> y(static_cast<std::size_t>(vectors * rows + 1), -7);
        GetParam()->products(x.data() + 1, vectors, w.data() + 1, rows, k, y.data());
        EXPECT_EQ(y.back(), -7) << "what stands behind stays";
        for (int m = 0; m < vectors; ++m) {
          for (std::int64_t r = 0; r < rows; ++r) {
            std::int64_t sum = 0;
            for (std::int64_t i = 0; i < k; ++i)
              sum += std::int64_t{x[static_cast<std::size_t>(m * k + i + 1)]} * weight(r, i);
            ASSERT_EQ(y[static_cast<std::size_t>(m * rows + r)], sum) << k << " " << rows << " " << vectors;
          }
        }
      }
    }
  }
}

TEST_P(Int8Products, CodesAreTheNearestWholeNumbers) {
  for (const int limit : {1, 127, 16512, 32767}) {
    for (const std::int64_t n : {1, 7, 16, 33, 1000}) {
      for (const double size : {1e-20, 1.0, 1e30}) {
        Rng rng(static_cast<std::uint64_t>(n + limit));
        std::vector<float> x(static_cast<std::size_t>(n));
        for (float& v : x) v = static_cast<float>(size * rng.normal());
        x[static_cast<std::size_t>(n / 2)] = 0.0f;
        x.back() = static_cast<float>(-5 * size);
        std::vector<std::int16_t> codes(x.size());
        const float scale = GetParam()->encode(x.data(), n, limit, codes.data());
        float peak = 0.0f;
        for (const float v : x) peak = std::max(peak, std::abs(v));
        EXPECT_FLOAT_EQ(scale, peak / static_cast<float>(limit));
        for (std::size_t i = 0; i < x.size(); ++i) {
          EXPECT_LE(std::abs(codes[i]), limit);
          EXPECT_NEAR(codes[i], static_cast<double>(x[i]) / scale, 0.5 + 4e-3);
        }
      }
    }
  }
}

TEST_P(Int8Products, CodesOfHalvesAreEven) {
  const std::vector<float> x = {4.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 3.5f};
  std::vector<std::int16_t> codes(x.size());
  EXPECT_EQ(GetParam()->encode(x.data(), std::ssize(x), 4, codes.data()), 1.0f);
  EXPECT_EQ(codes, (std::vector<std::int16_t>{4, 0, 2, 2, 0, -2, -2, 4}));
}

TEST_P(Int8Products, NothingAndNonsense) {
  std::vector<std::int16_t> codes(40, 5);
  const std::vector<float> zeros(40, -0.0f), tiny(40, 1e-40f);
  EXPECT_EQ(GetParam()->encode(zeros.data(), 0, 127, codes.data()), 0.0f);
  EXPECT_EQ(codes[0], 5);
  for (const auto& x : {zeros, tiny}) {
    EXPECT_EQ(GetParam()->encode(x.data(), 40, 32767, codes.data()), 0.0f);
    EXPECT_EQ(codes, std::vector<std::int16_t>(40, 0));
  }
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t at : {0, 17, 39}) {
      std::vector<float> x(40, 1.0f);
      x[at] = bad;
      EXPECT_TRUE(std::isnan(GetParam()->encode(x.data(), 40, 127, codes.data())));
      EXPECT_EQ(codes, std::vector<std::int16_t>(40, 0));
    }
  }
}

}  // namespace
}  // namespace lode
