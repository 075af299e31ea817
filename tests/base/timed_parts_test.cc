// SPDX-License-Identifier: Apache-2.0
#include "base/timed_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

namespace lode {
namespace {

TEST(TimedParts, AreNotedByNameAndAddedUp) {
  using namespace std::chrono_literals;
  for (int i = 0; i < 2; ++i) {
    const TimedPart outer("outer of a test");
    std::jthread([] {
      const TimedPart inner("inner of a test");
      std::this_thread::sleep_for(2ms);
    });
  }
  const auto all = timed_parts();
  const auto named = [&](const char* name) {
    return std::ranges::find(all, std::string(name), &std::pair<std::string, double>::first);
  };
  ASSERT_NE(named("inner of a test"), all.end());
  ASSERT_NE(named("outer of a test"), all.end());
  EXPECT_LT(named("inner of a test"), named("outer of a test"));  // it ended first
  EXPECT_GE(named("inner of a test")->second, 0.004);
  EXPECT_GE(named("outer of a test")->second, named("inner of a test")->second);
  EXPECT_GE(seconds_since_start(), named("outer of a test")->second);
}

}  // namespace
}  // namespace lode
