// SPDX-License-Identifier: Apache-2.0
// Ranks that go on after one of them has failed, on ranks that are threads (tests/cluster/mpi_test.cc: on processes).
#include "base/unison.h"

#include <gtest/gtest.h>

#include <new>
#include <string>
#include <vector>

#include "cluster/local_ranks.h"
#include "lodestone/error.h"
#include "support/unison_cases.h"

namespace lode {
namespace {

TEST(Unison, WhatFailsOnOneRankEndsOnAllWithItsReasonAndTheyGoOn) {
  for (const int size : {1, 2, 3, 5})
    run_local_ranks(size, [](Communicator& ranks) { test::fail_everywhere_and_go_on(ranks); });
}

TEST(Unison, AFailureIsItsKindOnAllRanks) {
  run_local_ranks(3, [](Communicator& ranks) {
    Unison unison(ranks);
    const auto fails = [&](const auto& error) {
      unison.run([&] {
        if (ranks.rank() == 1) throw error;
        ranks.barrier();
      });
    };
    try {
      fails(std::bad_alloc());
      FAIL();
    } catch (const std::bad_alloc& error) {
      EXPECT_STREQ(error.what(), "rank 1: out of memory");
    }
    EXPECT_THROW(fails(Interrupted()), Interrupted);
    EXPECT_THROW(fails(InputError("found none")), InputError);
    try {
      fails(RunError("the disk is full"));
    } catch (const RunError& error) {
      EXPECT_STREQ(error.what(), "rank 1: the disk is full");
    }
  });
}

TEST(Unison, WhatIsDoneBetweenFailsByItself) {
  run_local_ranks(3, [](Communicator& ranks) {
    Unison unison(ranks);
    int parts = 0;
    const auto between = [&] {
      EXPECT_THROW(unison.run([&] {
        if (ranks.rank() == 2) throw RunError("between");
        ranks.barrier();
      }),
                   RunError);
    };
    unison.run([&] {
      for (; parts < 4; ++parts) {
        ranks.barrier();
        unison.pause(between);
      }
    });
    EXPECT_EQ(parts, 4);
    // And what is decided there, by all alike, ends the whole.
    EXPECT_THROW(unison.run([&] { unison.pause([] { throw Interrupted(); }); }), Interrupted);
    EXPECT_EQ(ranks.broadcast(std::string(ranks.rank() == 0 ? "on" : "")), "on");
  });
}

TEST(Unison, OutcomesAreAlikeOrItEnds) {
  run_local_ranks(3, [](Communicator& ranks) {
    std::vector<Outcome> outcomes = {{"a"}, {"b"}, {"c"}};
    if (ranks.rank() == 2) outcomes[1].failure = std::make_exception_ptr(InputError("no b"));
    agree(ranks, outcomes);
    EXPECT_FALSE(outcomes[0].failure || outcomes[2].failure);
    ASSERT_TRUE(outcomes[1].failure);
    EXPECT_THROW(std::rethrow_exception(outcomes[1].failure), InputError);
    outcomes = {{"a"}, {ranks.rank() == 1 ? "x" : "b"}};
    EXPECT_THROW(agree(ranks, outcomes), RankLost);
  });
}

TEST(Unison, ALostRankEndsAll) {
  EXPECT_THROW(run_local_ranks(3,
                               [](Communicator& ranks) {
                                 Unison unison(ranks);
                                 if (ranks.rank() == 1) throw RunError("gone");
                                 EXPECT_THROW(unison.run([&] { ranks.barrier(); }), RankLost);
                                 EXPECT_THROW(ranks.expect_alive(), RankLost);
                               }),
               RunError);
}

}  // namespace
}  // namespace lode
