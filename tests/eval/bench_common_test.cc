// SPDX-License-Identifier: Apache-2.0
// Medians of lists that are easily looked over.
#include <gtest/gtest.h>

#include "lab/bench/common.h"

namespace lode {
namespace {

TEST(Median, IsTheMiddleOneOrTheMeanOfTwo) {
  EXPECT_EQ(median({}), 0.0);
  EXPECT_EQ(median({7}), 7.0);
  EXPECT_EQ(median({9, 1, 4}), 4.0);
  EXPECT_EQ(median({8, 1}), 4.5);
  EXPECT_EQ(median({9, 1, 4, 2}), 3.0);
  EXPECT_EQ(median({-5, -1, -3, -2}), -2.5);
}

}  // namespace
}  // namespace lode
