// SPDX-License-Identifier: Apache-2.0
// Arrays of an arena are zero, lie apart and stay in place, whatever their sizes and whoever asks.
#include "base/huge_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace lode {
namespace {

bool all_are(std::span<const std::byte> bytes, int value) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [=](std::byte b) { return b == static_cast<std::byte>(value); });
}

TEST(HugeArena, ArraysAreZeroAndLieApart) {
  HugeArena arena;
  const std::size_t mapping = std::size_t{64} << 20;  // the least one: some arrays fit its rest, some do not
  std::vector<std::span<std::byte>> taken;
  int value = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{64}, std::size_t{100'000}, mapping - 5,
                                  mapping / 2, std::size_t{0}, mapping + 1, mapping / 2, std::size_t{65}}) {
    const std::span<std::byte> array = taken.emplace_back(arena.take(bytes));
    EXPECT_EQ(array.size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data()) % 64, 0u);
    EXPECT_TRUE(all_are(array, 0)) << bytes;
    std::fill(array.begin(), array.end(), static_cast<std::byte>(++value));
  }
  for (std::size_t i = 0; i < taken.size(); ++i)
    EXPECT_TRUE(all_are(taken[i], static_cast<int>(i) + 1)) << taken[i].size();
}

TEST(HugeArena, ThreadsGetArraysOfTheirOwn) {
  HugeArena arena;
  std::vector<std::vector<std::span<std::byte>>> taken(4);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < taken.size(); ++t)
      threads.emplace_back([&, t] {
        for (std::size_t i = 1; i <= 200; ++i) {
          const auto array = taken[t].emplace_back(arena.take(i * 100));
          std::fill(array.begin(), array.end(), static_cast<std::byte>(t + 1));
        }
      });
  }
  for (std::size_t t = 0; t < taken.size(); ++t)
    for (const auto array : taken[t]) EXPECT_TRUE(all_are(array, static_cast<int>(t) + 1));
}

}  // namespace
}  // namespace lode
