// SPDX-License-Identifier: Apache-2.0
// Which keys are active after any finds, and that each key is attended in one place.
#include "gpu/active_keys.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/rng.h"
#include "base/threads.h"

namespace lode {
namespace {

constexpr int kLayers = 2, kHeads = 2;

QuerySet set_of(int kv_head, std::uint32_t heads = 1, int tokens = 1) {
  return {.sequence = 0, .kv_head = kv_head, .heads = heads, .token_begin = 0, .token_end = tokens};
}

/// The keys of all sets of a head, in order, each as often as it stands there.
std::vector<Position> keys_of(const Selection& selection, int kv_head) {
  std::vector<Position> keys;
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const Selection::Set set = selection.set(i);
    if (set.queries.kv_head != kv_head) continue;
    for (const Run& run : set.runs)
      for (Position row = run.begin; row < run.end; ++row) keys.push_back(row);
    keys.insert(keys.end(), set.rows.begin(), set.rows.end());
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

/// A token for which each head finds `often` and some of many others.
Selection some_found(std::span<const Position> often, Rng& rng) {
  Selection found;
  for (int head = 0; head < kHeads; ++head) {
    std::set<Position> rows(often.begin(), often.end());
    for (int i = 0; i < 30; ++i) rows.insert(static_cast<Position>(5000 + rng.below(20000)));
    found.add_set(set_of(head));
    found.add_run(100, 103);
    found.add_rows(std::vector<Position>(rows.begin(), rows.end()));
  }
  return found;
}

TEST(ActiveKeys, KeysFoundTokenAfterTokenAreTakenAndThoseFoundNoMoreLeave) {
  ThreadPool pool(2);
  ActiveKeys keys(kLayers, kHeads, 40);
  Rng rng(3);
  const std::vector<Position> often = {7, 9, 300, 4000};
  for (int token = 0; token < 48; ++token) {
    Selection rest;
    keys.take(1, some_found(often, rng), rest, pool);
    if (token % 16 == 15) keys.update(pool);
  }
  EXPECT_TRUE(keys.rows(0, 0).empty());
  const auto rows = keys.rows(1, 0);
  const std::set<Position> active(rows.begin(), rows.end());
  EXPECT_EQ(active, (std::set<Position>{7, 9, 100, 101, 102, 300, 4000}));
  for (int token = 0; token < 160; ++token) {  // other keys are wanted now
    Selection rest;
    keys.take(1, some_found(std::vector<Position>{11}, rng), rest, pool);
    if (token % 16 == 15) keys.update(pool);
  }
  const auto later = keys.rows(1, 0);
  EXPECT_EQ(std::set<Position>(later.begin(), later.end()), (std::set<Position>{11, 100, 101, 102}));
  keys.clear();
  EXPECT_TRUE(keys.rows(1, 0).empty());
}

/// Random finds, with more keys that win than there are slots: of what was found, each row is either active
/// or left, never both; slots hold different keys and only what moves said; moves bring every change.
TEST(ActiveKeys, AKeyIsActiveOrLeftAndSlotsHoldWhatMovesSaid) {
  ThreadPool pool(3);
  ActiveKeys keys(kLayers, kHeads, 24);
  Rng rng(17);
  std::map<std::tuple<int, int, int>, Position> slots;
  for (int token = 0; token < 600; ++token) {
    std::vector<Position> often;
    const auto phase = static_cast<Position>(token / 100 * 20);
    for (Position row = 0; row < 60; ++row)
      if (rng.below(3) != 0) often.push_back(phase + row * 3);
    for (int layer = 0; layer < kLayers; ++layer) {
      const Selection found = some_found(often, rng);
      Selection rest;
      const std::int64_t hits = keys.take(layer, found, rest, pool);
      std::int64_t counted = 0;
      for (int head = 0; head < kHeads; ++head) {
        const auto rows = keys.rows(layer, head);
        const std::set<Position> active(rows.begin(), rows.end());
        ASSERT_EQ(active.size(), rows.size()) << "no key twice";
        std::vector<Position> expected;
        for (const Position row : keys_of(found, head)) {
          if (active.contains(row)) {
            ++counted;
          } else {
            expected.push_back(row);
          }
        }
        ASSERT_EQ(keys_of(rest, head), expected);
      }
      ASSERT_EQ(hits, counted);
    }
    if (token % 16 != 15) continue;
    for (const ActiveKeys::Move& move : keys.update(pool))
      slots[{move.layer, move.kv_head, move.slot}] = move.row;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        const auto rows = keys.rows(layer, head);
        ASSERT_LE(std::ssize(rows), keys.slots());
        for (std::size_t slot = 0; slot < rows.size(); ++slot) {
          const auto sent = slots.find({layer, head, static_cast<int>(slot)});
          ASSERT_TRUE(sent != slots.end() && sent->second == rows[slot]);
        }
      }
    }
  }
  EXPECT_EQ(std::ssize(keys.rows(0, 0)), keys.slots());
}

TEST(ActiveKeys, WhatIsActiveDoesNotDependOnThreads) {
  std::vector<Position> of_first;
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    ActiveKeys keys(kLayers, kHeads, 8);
    Rng rng(5);
    for (int token = 0; token < 64; ++token) {
      std::vector<Position> often;
      for (Position row = 0; row < 40; ++row)
        if (rng.below(2) != 0) often.push_back(row);
      Selection rest;
      keys.take(0, some_found(often, rng), rest, pool);
      if (token % 16 == 15) keys.update(pool);
    }
    const auto rows = keys.rows(0, 1);
    if (threads == 1) of_first.assign(rows.begin(), rows.end());
    EXPECT_EQ(std::vector<Position>(rows.begin(), rows.end()), of_first);
  }
}

/// The same finds in one step of sixteen tokens as in sixteen steps.
TEST(ActiveKeys, WhatIsActiveDoesNotDependOnChunks) {
  ThreadPool pool(2);
  ActiveKeys together(1, 2, 6), apart(1, 2, 6);
  Selection rest;
  for (int block = 0; block < 12; ++block) {
    Selection all;
    for (int token = 0; token < 16; ++token) {
      Selection one;
      for (int head = 0; head < 2; ++head) {
        const std::vector<Position> found = {static_cast<Position>(100 + block / 3), 7,
                                             static_cast<Position>(200 + (token + head) % 5)};
        for (Selection* to : {&one, &all}) {
          to->add_set(set_of(head));
          to->add_rows(found);
        }
      }
      apart.take(0, one, rest, pool);
    }
    together.take(0, all, rest, pool);
    const auto a = together.update(pool), b = apart.update(pool);
    ASSERT_EQ(a.size(), b.size()) << block;
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].slot, b[i].slot);
      EXPECT_EQ(a[i].row, b[i].row);
    }
    for (int head = 0; head < 2; ++head)
      EXPECT_TRUE(std::ranges::equal(together.rows(0, head), apart.rows(0, head))) << block;
  }
  EXPECT_FALSE(together.rows(0, 0).empty());
}

/// Weights and the tokens of a set stay with what is left; sets with an estimate never have active keys.
TEST(ActiveKeys, WeightsStayAndEstimatesForbid) {
  ThreadPool pool(1);
  ActiveKeys keys(1, 2, 8);
  const std::vector<float> output = {1.0f, 2.0f}, lse = {0.5f};
  Selection rest;
  for (int token = 0; token < 16; ++token) {
    Selection found;
    found.add_set(set_of(0, 3, 2));
    found.add_row(5, -1.0f);
    found.add_row(static_cast<Position>(1000 + token), -2.0f);
    found.add_set(set_of(1));
    found.add_rows(std::vector<Position>{5});
    found.set_tail(output, lse);
    EXPECT_EQ(keys.take(0, found, rest, pool), 0);
  }
  keys.update(pool);
  EXPECT_EQ(std::ssize(keys.rows(0, 0)), 1);
  EXPECT_EQ(keys.rows(0, 0)[0], 5);
  EXPECT_TRUE(keys.rows(0, 1).empty());
  Selection found;
  found.add_set(set_of(0, 3, 2));
  found.add_row(5, -1.0f);
  found.add_row(2000, -2.0f);
  found.add_set(set_of(1));
  found.set_tail(output, lse);
  EXPECT_EQ(keys.take(0, found, rest, pool), 2) << "once for each token of the set";
  ASSERT_EQ(rest.sets(), 2);
  ASSERT_EQ(rest.set(0).rows.size(), 1u);
  EXPECT_EQ(rest.set(0).rows[0], 2000);
  EXPECT_EQ(rest.set(0).log_weights[0], -2.0f);
  EXPECT_EQ(rest.set(1).tail_lse.size(), 1u);
}

/// A run of thousands of keys says nothing of them; active ones are cut out of it all the same.
TEST(ActiveKeys, LongRunsAreCutAroundActiveKeys) {
  ThreadPool pool(1);
  ActiveKeys keys(1, 1, 8);
  Selection rest, found;
  found.add_set(set_of(0));
  found.add_rows(std::vector<Position>{10, 11, 500});
  for (int token = 0; token < 16; ++token) keys.take(0, found, rest, pool);
  keys.update(pool);
  Selection all;
  all.add_set(set_of(0));
  all.add_run(10, 2000);
  EXPECT_EQ(keys.take(0, all, rest, pool), 3);
  const auto runs = rest.set(0).runs;
  EXPECT_EQ(std::vector<lode::Run>(runs.begin(), runs.end()),
            (std::vector<lode::Run>{{12, 500}, {501, 2000}}));
}

}  // namespace
}  // namespace lode
