// SPDX-License-Identifier: Apache-2.0
// Every table finds the same scores, writes no further than it says, and takes what is not a number along.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kernels/select/filter_above.h"

namespace lode {
namespace {

class FilterAbove : public testing::TestWithParam<const FilterAboveKernels*> {};
INSTANTIATE_TEST_SUITE_P(EveryTable, FilterAbove, testing::ValuesIn(supported_filter_above_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(FilterAbove, CollectsWhatIsNotBelow) {
  constexpr float kInf = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::int32_t kUntouched = -7;
  Rng rng(3);
  for (const std::size_t n : {0u, 1u, 7u, 8u, 15u, 16u, 17u, 31u, 33u, 64u, 100u, 2048u}) {
    std::vector<float> scores(n);
    for (float& score : scores) {
      const std::uint64_t kind = rng.below(40);
      score = kind == 0 ? kNan : kind == 1 ? kInf : kind == 2 ? -kInf : static_cast<float>(rng.below(20)) - 9;
    }
    for (const float least : {-kInf, -9.0f, -0.0f, 0.0f, 9.5f, kInf}) {
      std::vector<std::int32_t> expected;
      for (std::size_t i = 0; i < n; ++i)
        if (!(scores[i] < least)) expected.push_back(static_cast<std::int32_t>(i));
      const std::size_t room = std::min(expected.size() + 16, n);
      std::vector<std::int32_t> places(room + 1, kUntouched);
      const std::int64_t count =
          GetParam()->collect(scores.data(), static_cast<std::int64_t>(n), least, places.data());
      ASSERT_EQ(count, std::ssize(expected)) << n << " scores, " << least;
      EXPECT_EQ(places.back(), kUntouched);
      places.resize(expected.size());
      EXPECT_EQ(places, expected) << n << " scores, " << least;
    }
  }
}

}  // namespace
}  // namespace lode
