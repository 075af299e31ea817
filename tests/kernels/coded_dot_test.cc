// SPDX-License-Identifier: Apache-2.0
// Coded products: a query loses less than a key's 8 bits, and every table gives the exact whole number times
// the key's scale, at every length, for numbers as large as they come.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "kernels/select/int8_dot.h"

namespace lode {
namespace {

class Int8Dot : public testing::TestWithParam<const Int8DotKernels*> {};
INSTANTIATE_TEST_SUITE_P(Kernels, Int8Dot, testing::ValuesIn(supported_int8_dot_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(Int8Dot, IsTheWholeNumberTimesTheScale) {
  constexpr std::int64_t kKeys = 37;
  for (const int d : {1, 3, 32, 60, 61, 64, 65, 80, 124, 128, 200, 518, 519, 576, kMaxHeadDim}) {
    for (const bool extreme : {false, true}) {
      Rng rng(static_cast<std::uint64_t>(d));
      std::vector<float> q(static_cast<std::size_t>(d)), scales(kKeys);
      for (float& x : q) x = extreme ? -3.0f : static_cast<float>(rng.normal());
      for (float& x : scales) x = static_cast<float>(rng.normal());
      // Memory of just the keys: a read beyond would be seen by the sanitizers. Behind a key's last number
      // anything may stand.
      const int stride = CodedRows::stride_for(d);
      std::vector<std::int8_t> codes(static_cast<std::size_t>(kKeys * stride));
      for (std::int8_t& x : codes)
        x = static_cast<std::int8_t>(extreme ? -127 : static_cast<int>(rng.below(255)) - 127);
      for (std::size_t i = 0; i < scales.size(); ++i)
        std::memcpy(codes.data() + (i + 1) * static_cast<std::size_t>(stride) - sizeof(float), &scales[i],
                    sizeof(float));
      const CodedRows keys = {.data = reinterpret_cast<const std::byte*>(codes.data()), .stride = stride};
      CodedQuery coded;
      code_query(std::vector<float>(kMaxHeadDim, 1.0f), coded);  // what a longer query leaves behind
      code_query(q, coded);
      for (const std::int64_t count : {0, 1, 3, 4, 5, 33}) {
        std::vector<Position> rows;
        for (std::int64_t i = 0; i < count; ++i)
          rows.push_back(i == 0 ? kKeys - 1 : static_cast<Position>(rng.below(kKeys)));
        std::vector<float> scores(static_cast<std::size_t>(count + 1), -7.0f);
        GetParam()->score(coded, keys, rows.data(), count, scores.data());
        for (std::size_t i = 0; i < rows.size(); ++i) {
          std::int64_t sum = 0;
          for (int c = 0; c < d; ++c)
            sum += std::int64_t{coded.whole[c]} * codes[static_cast<std::size_t>(rows[i] * stride + c)];
          const float expected = static_cast<float>(sum) * scales[static_cast<std::size_t>(rows[i])];
          ASSERT_EQ(std::bit_cast<std::uint32_t>(scores[i]), std::bit_cast<std::uint32_t>(expected))
              << d << ", row " << rows[i];
        }
        EXPECT_EQ(scores.back(), -7.0f);
      }
    }
  }
}

TEST(CodedQuery, IsTheQueryUpToAFactor) {
  Rng rng(5);
  std::vector<float> q(100);
  for (float& x : q) x = static_cast<float>(rng.normal() * 1e-3);
  q[7] = -0.5f;  // one number far larger than the others
  CodedQuery coded;
  code_query(q, coded);
  EXPECT_EQ(coded.whole[7], -most_coded(100));
  for (std::size_t i = 0; i < q.size(); ++i) {
    EXPECT_NEAR(static_cast<float>(coded.whole[i]), q[i] * static_cast<float>(most_coded(100)) / 0.5f, 0.51f);
    EXPECT_EQ(coded.whole[i], 256 * coded.high[i] + coded.low[i]);
  }
}

TEST(CodedQuery, OfManyNumbersLeavesTheSumRoom) {
  EXPECT_EQ(most_coded(1), 127 * 256 + 127);
  for (const int d : {512, 518, 519, 576, kMaxHeadDim}) {
    EXPECT_LE(std::int64_t{d} * 127 * most_coded(d), std::numeric_limits<std::int32_t>::max()) << d;
    EXPECT_GT(most_coded(d), 1 << 14) << d;
  }
}

TEST(CodedQuery, OfNoNumbersIsNothing) {
  for (const float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), 0.0f, 1e-44f}) {
    CodedQuery coded;
    code_query(std::vector<float>{odd, odd == odd && std::abs(odd) < 1.0f ? 0.0f : 1.0f}, coded);
    EXPECT_EQ(coded.whole[0], 0) << odd;
    EXPECT_EQ(coded.whole[1], 0) << odd;
    EXPECT_EQ(coded.offset, 0u) << odd;
  }
}

}  // namespace
}  // namespace lode
