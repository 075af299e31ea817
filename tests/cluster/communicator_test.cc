// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other, on ranks that are threads.
#include "base/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "base/rng.h"
#include "cluster/local_ranks.h"
#include "cluster/merge_states.h"
#include "lodestone/error.h"

namespace lode {
namespace {

using std::chrono::milliseconds;

TEST(Ranks, SharesCoverAllAndDifferByOneAtMost) {
  for (const std::int64_t count : {0, 1, 6, 7, 8, 1000}) {
    for (const int size : {1, 2, 3, 7, 16}) {
      std::int64_t at = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Share share = share_of(count, rank, size);
        EXPECT_EQ(share.begin, at);
        EXPECT_GE(share.count(), count / size);
        EXPECT_LE(share.count(), count / size + 1);
        at = share.end;
      }
      EXPECT_EQ(at, count);
    }
  }
}

TEST(Ranks, EverybodyGetsWhatEverybodySaid) {
  for (const int size : {1, 2, 3, 7}) {
    run_local_ranks(size, [&](Communicator& ranks) {
      const auto all = ranks.all_strings(std::string(static_cast<std::size_t>(ranks.rank()) * 3, 'x'));
      ASSERT_EQ(std::ssize(all), size);
      for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], std::string(r * 3, 'x'));
      std::vector<std::int64_t> numbers = {1, ranks.rank(), -5};
      ranks.sum(numbers);
      EXPECT_THAT(numbers, testing::ElementsAre(size, size * (size - 1) / 2, -5 * size));
      EXPECT_EQ(ranks.broadcast(ranks.rank() == size - 1 ? "last" : "another", size - 1), "last");
      ranks.barrier();
    });
  }
}

/// States of random keys, each rank its own, and one rank that has none.
TEST(Ranks, StatesMergeInTheOrderOfTheRanksWhateverComesFirst) {
  constexpr std::int64_t kRows = 11, kD = 8;
  for (const int size : {1, 2, 3, 7, 16}) {
    std::vector<std::vector<float>> outputs(static_cast<std::size_t>(size)), lses(outputs);
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      Rng rng(r + 1);
      for (std::int64_t i = 0; i < kRows * kD; ++i) outputs[r].push_back(r == 1 ? 0.0f : rng.uniform());
      for (std::int64_t i = 0; i < kRows; ++i)
        lses[r].push_back(r == 1 ? -std::numeric_limits<float>::infinity() : rng.uniform());
    }
    auto wanted_output = outputs[0], wanted_lse = lses[0];
    for (std::size_t r = 1; r < outputs.size(); ++r)
      merge({wanted_output.data(), wanted_lse.data(), kRows, kD},
            {outputs[r].data(), lses[r].data(), kRows, kD});
    run_local_ranks(size, [&](Communicator& ranks) {
      const auto r = static_cast<std::size_t>(ranks.rank());
      std::this_thread::sleep_for(milliseconds(hash_seed(r, 3) % 5));
      auto output = outputs[r], lse = lses[r];
      merge_states(ranks, {output.data(), lse.data(), kRows, kD});
      EXPECT_EQ(output, wanted_output);
      EXPECT_LE(ranks.sent().messages, 2 * (size - 1));
      std::int64_t bytes = ranks.sent().bytes;
      ranks.sum({&bytes, 1});
      EXPECT_LE(bytes, size * 2 * kRows * (kD + 1) * std::int64_t{sizeof(float)});
      output = outputs[r];
      lse = lses[r];
      merge_states(ranks, {output.data(), lse.data(), kRows, kD}, MergedParts::output_and_lse);
      EXPECT_EQ(output, wanted_output);
      EXPECT_EQ(lse, wanted_lse);
    });
  }
}

std::string failure_of(int size, const std::function<void(Communicator&)>& body, milliseconds patience) {
  try {
    run_local_ranks(size, body, patience);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

TEST(Ranks, AFailureEndsAllWithItsReason) {
  const auto body = [](Communicator& ranks) {
    if (ranks.rank() == 2) throw RunError("out of memory");
    try {
      ranks.barrier();
      FAIL() << "the barrier passed without rank 2";
    } catch (const RunError& error) {
      EXPECT_STREQ(error.what(), "rank 2: out of memory");
      throw;
    }
  };
  EXPECT_EQ(failure_of(4, body, std::chrono::seconds(60)), "out of memory");
}

TEST(Ranks, ARankThatHangsIsNamedAfterAWhile) {
  const auto body = [](Communicator& ranks) {
    if (ranks.rank() == 1) return std::this_thread::sleep_for(milliseconds(300));
    ranks.barrier();
  };
  EXPECT_THAT(failure_of(3, body, milliseconds(100)), testing::HasSubstr("has given no sign of life"));
}

}  // namespace
}  // namespace lode
