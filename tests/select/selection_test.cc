// SPDX-License-Identifier: Apache-2.0
// Selections hold what was put in, set by set.
#include "lodestone/selection.h"

#include <gtest/gtest.h>

#include "attend/keys.h"

namespace lode {
namespace {

template <class T>
std::vector<T> list(std::span<const T> x) {
  return {x.begin(), x.end()};
}

TEST(Selection, SetsKeepTheirOwnParts) {
  Selection s;
  s.add_set({0, 1, 0b11, 0, 2});
  s.add_run(3, 9);
  s.add_run(9, 9);  // empty: not kept
  s.add_rows(std::vector<Position>{12, 15});
  s.add_set({2, 0, 0b01, 4, 5});
  s.add_set({2, 0, 0b10, 4, 5});
  s.add_row(7, 0.5f);
  s.add_row(2, -1.0f);
  s.add_row(4);
  s.sort_rows();
  s.set_tail(std::vector<float>{1, 2}, std::vector<float>{3});
  s.set_tail(std::vector<float>{4, 5}, std::vector<float>{6});  // replaces
  Selection all;
  all.add_set({5, 5, 1, 0, 1});
  all.add_row(1, 2.0f);
  all.append(s);
  all.append(Selection());
  ASSERT_EQ(all.sets(), 4);
  EXPECT_EQ(all.keys(0), 1);
  EXPECT_EQ(list(all.set(0).log_weights), std::vector<float>{2.0f});
  EXPECT_EQ(list(all.set(1).runs), (std::vector<lode::Run>{{3, 9}}));
  EXPECT_EQ(list(all.set(1).rows), (std::vector<Position>{12, 15}));
  EXPECT_TRUE(all.set(1).log_weights.empty());
  EXPECT_TRUE(all.set(1).tail_lse.empty());
  EXPECT_EQ(all.keys(1), 8);
  EXPECT_EQ(all.set(1).queries.kv_head, 1);
  EXPECT_EQ(all.keys(2), 0);
  EXPECT_EQ(list(all.set(3).rows), (std::vector<Position>{2, 4, 7}));
  EXPECT_EQ(list(all.set(3).log_weights), (std::vector<float>{-1.0f, 0.0f, 0.5f}));
  EXPECT_EQ(list(all.set(3).tail_output), (std::vector<float>{4, 5}));
  EXPECT_EQ(list(all.set(3).tail_lse), std::vector<float>{6});
  all.clear();
  EXPECT_EQ(all.sets(), 0);
}

TEST(Keys, NeighboursJoinAndShortPiecesBecomeRows) {
  Selection s;
  s.add_set({0, 0, 1, 0, 1});
  s.add_run(10, 20);
  s.add_run(40, 45);
  for (Position row = 20; row < 40; ++row) s.add_row(row);
  s.add_row(50);
  FarKeys far;
  far.assign(s.set(0), 1, 100);
  EXPECT_EQ(far.runs, (std::vector<lode::Run>{{10, 45}, {50, 51}}));
  EXPECT_EQ(far.count_below(51), 36);
  EXPECT_EQ(far.count_below(50), 35);
  EXPECT_EQ(far.count_below(12), 2);
  EXPECT_FALSE(far.is_all(1, 100));
  KeyList keys;
  keys.add({0, 1});
  keys.add(far, 1, 100);
  keys.add({51, 60});
  keys.finish();
  EXPECT_EQ(list(keys.runs()), (std::vector<lode::Run>{{10, 45}}));
  EXPECT_EQ(list(keys.rows()), (std::vector<Position>{0, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59}));
  EXPECT_TRUE(keys.log_weights().empty());
}

TEST(Selection, RowsBehindAWeightedOneWeighNothing) {
  Selection s;
  s.add_set({0, 0, 1, 0, 1});
  s.add_row(6, 0.25f);
  s.add_rows(std::vector<Position>(
      100, 8));  // the last of the selection: nothing behind them makes room for weights
  std::vector<float> expected(101, 0.0f);
  expected[0] = 0.25f;
  EXPECT_EQ(list(s.set(0).log_weights), expected);
}

TEST(Selection, WeightsOfSomeSetsLeaveTheOthersPlain) {
  Selection s, other;
  s.add_set({0, 0, 1, 0, 1});
  s.add_rows(std::vector<Position>{1, 2, 3});
  other.add_set({1, 0, 1, 0, 1});
  other.add_row(5);
  other.add_row(6, 0.25f);
  other.add_rows(std::vector<Position>{8, 9});
  other.add_set({2, 0, 1, 0, 1});
  other.add_row(9);
  other.add_row(4);
  other.sort_rows();
  s.append(other);
  s.add_set({3, 0, 1, 0, 1});
  s.add_rows(std::vector<Position>{0});
  s.add_row(2, 1.0f);
  EXPECT_TRUE(s.set(0).log_weights.empty());
  EXPECT_EQ(list(s.set(1).log_weights), (std::vector<float>{0.0f, 0.25f, 0.0f, 0.0f}));
  EXPECT_TRUE(s.set(2).log_weights.empty());
  EXPECT_EQ(list(s.set(2).rows), (std::vector<Position>{4, 9}));
  EXPECT_EQ(list(s.set(3).log_weights), (std::vector<float>{0.0f, 1.0f}));
}

/// Long lists without long pieces are taken whole: pieces at their ends must join with what lies beside.
TEST(Keys, ListsTakenWholeAreThoseTakenRowByRow) {
  const auto piece = [](Position begin, Position count) {
    std::vector<Position> rows;
    for (Position row = begin; row < begin + count; ++row) rows.push_back(row);
    return rows;
  };
  const auto joined = [](std::vector<Position> a, const std::vector<Position>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const std::vector<std::vector<Position>> lists = {piece(5, 1),
                                                    piece(5, 15),
                                                    piece(5, 16),
                                                    piece(4, 3),  // touches the sink
                                                    joined(piece(5, 15), piece(21, 15)),
                                                    joined(piece(5, 2), piece(90, 10)),  // touches the window
                                                    joined(piece(4, 12), piece(88, 12)),
                                                    joined(joined(piece(6, 3), piece(30, 17)), piece(99, 1))};
  for (const std::vector<Position>& rows : lists) {
    SCOPED_TRACE(testing::PrintToString(rows));
    Selection s;
    s.add_set({0, 0, 1, 0, 1});
    s.add_rows(rows);
    FarKeys far;
    far.assign(s.set(0), 4, 100);
    KeyList keys, expected;
    for (KeyList* const to : {&keys, &expected}) {
      to->add({0, 4});
      if (to == &keys) to->add(far, 4, 100);
      for (const Position row : to == &keys ? std::vector<Position>{} : rows) to->add({row, row + 1});
      to->add({100, 107});
      to->finish();
    }
    EXPECT_EQ(list(keys.runs()), list(expected.runs()));
    EXPECT_EQ(list(keys.rows()), list(expected.rows()));
  }
}

}  // namespace
}  // namespace lode
