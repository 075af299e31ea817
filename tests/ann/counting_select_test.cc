// SPDX-License-Identifier: Apache-2.0
// Counting select against a sort: budgets exact, ties to the newest or all, the three modes of
// HashAttention's appendix A.1.
#include "ann/hashing/counting_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/rng.h"

namespace lode {
namespace {

/// The definition, by sorting (distance, newest first).
std::vector<Position> by_sorting(const std::vector<std::uint16_t>& distance, const NearRule& rule,
                                 Position offset) {
  std::vector<Position> order(distance.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](Position i) { return std::int64_t{distance[static_cast<std::size_t>(i)]}; };
  std::sort(order.begin(), order.end(),
            [&](Position a, Position b) { return at(a) != at(b) ? at(a) < at(b) : a > b; });
  std::vector<Position> rows;
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    const std::int64_t budget = std::min<std::int64_t>(rule.budget, std::ssize(order));
    const bool deep = at(order[rank]) <= at(order[0]) + rule.depth;
    bool counted = static_cast<std::int64_t>(rank) < budget;
    if (rule.all_ties && budget > 0)
      counted = at(order[rank]) <= at(order[static_cast<std::size_t>(budget - 1)]);
    if ((counted || rule.mode == NearRule::Mode::depth) && (deep || rule.mode == NearRule::Mode::count))
      rows.push_back(offset + order[rank]);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

TEST(SelectNear, EqualsASort) {
  Rng rng(1);
  std::vector<Position> rows = {1, 2, 3};  // what an earlier call left
  for (int round = 0; round < 3000; ++round) {
    const auto n = static_cast<std::size_t>(rng.below(round % 10 == 0 ? 5000 : 70));
    const std::uint64_t levels = 1 + rng.below(round % 3 == 0 ? 3 : 200);
    std::vector<std::uint16_t> distance(n);
    for (std::uint16_t& d : distance) d = static_cast<std::uint16_t>(rng.below(levels) + rng.below(levels));
    const NearRule rule = {.mode = static_cast<NearRule::Mode>(rng.below(3)),
                           .budget = static_cast<std::int64_t>(rng.below(n + 3)),
                           .depth = static_cast<std::int64_t>(rng.below(20)),
                           .all_ties = rng.below(2) == 0};
    select_near(distance, rule, 50, rows);
    ASSERT_EQ(rows, by_sorting(distance, rule, 50)) << round;
  }
}

TEST(SelectNear, BudgetsAreMetExactlyWhateverTheTies) {
  std::vector<Position> rows;
  std::vector<std::uint16_t> equal(3000, 7), two(3000, 7);
  std::fill(two.begin(), two.begin() + 1000, std::uint16_t{3});
  for (const std::int64_t budget : {0, 1, 2, 999, 1000, 1001, 1024, 2999, 3000, 3001}) {
    for (const auto* distance : {&equal, &two}) {
      select_near(*distance, {.budget = budget}, 0, rows);
      EXPECT_EQ(std::ssize(rows), std::min<std::int64_t>(budget, 3000));
    }
  }
  select_near(equal, {.budget = 2}, 0, rows);
  EXPECT_EQ(rows, (std::vector<Position>{2998, 2999}));  // the newest
  select_near(two, {.budget = 1001}, 0, rows);
  EXPECT_EQ(rows.back(), 2999);
  EXPECT_EQ(rows[999], 999);
  select_near(two, {.budget = 1, .all_ties = true}, 0, rows);
  EXPECT_EQ(std::ssize(rows), 1000);
}

TEST(SelectNear, NearestAndFarthestLevels) {
  std::vector<Position> rows;
  const std::vector<std::uint16_t> distance = {65535, 0, 65535, 65535};
  for (const bool all : {false, true}) {
    select_near(distance, {.budget = 1, .all_ties = all}, 0, rows);
    EXPECT_EQ(rows, (std::vector<Position>{1}));
  }
  select_near(distance, {.budget = 2}, 0, rows);
  EXPECT_EQ(rows, (std::vector<Position>{1, 3}));
  select_near(distance, {.mode = NearRule::Mode::depth, .depth = 70000}, 0, rows);
  EXPECT_EQ(std::ssize(rows), 4);
  select_near({}, {.budget = 5}, 0, rows);
  EXPECT_TRUE(rows.empty());
  select_near({}, {.mode = NearRule::Mode::depth}, 0, rows);
  EXPECT_TRUE(rows.empty());
}

}  // namespace
}  // namespace lode
