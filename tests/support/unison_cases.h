// SPDX-License-Identifier: Apache-2.0
// A rank that fails in the middle of what all do: for ranks that are threads, and for those that are processes.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/communicator.h"
#include "base/unison.h"
#include "lodestone/error.h"

namespace lode::test {

/// Each rank fails in turn, in front of its n-th message, with messages of all sizes under way; after each failure the
/// ranks understand each other.
inline void fail_everywhere_and_go_on(Communicator& ranks) {
  constexpr int kRounds = 4;
  Unison unison(ranks);
  for (int who = 0; who < ranks.size(); ++who) {
    for (int when = 0; when <= kRounds; ++when) {
      int rounds = 0;
      const auto body = [&] {
        for (; rounds < kRounds; ++rounds) {
          if (ranks.rank() == who && rounds == when) throw RunError("enough");
          const std::size_t bytes = rounds % 2 == 0 ? 3 : std::size_t{1} << 16;
          const auto all = ranks.all_strings(std::string(bytes, static_cast<char>('a' + ranks.rank())));
          ASSERT_EQ(all.back().size(), bytes);
          // Who only sends learns of the failure at the end.
          ranks.broadcast(std::string(ranks.rank() == 0 ? bytes : 0, 'x'));
        }
      };
      if (when == kRounds) {
        unison.run(body);
        EXPECT_EQ(rounds, kRounds);
      } else {
        try {
          unison.run(body);
          ADD_FAILURE() << "rank " << who << " was to fail in front of round " << when;
        } catch (const RunError& error) {
          EXPECT_EQ(std::string(error.what()),
                    who == 0 ? "enough" : "rank " + std::to_string(who) + ": enough");
        }
        EXPECT_LE(rounds, when + 1);
      }
      const auto heard = ranks.all_strings(std::to_string(ranks.rank() + 100 * when));
      for (int r = 0; r < ranks.size(); ++r)
        EXPECT_EQ(heard[static_cast<std::size_t>(r)], std::to_string(r + 100 * when));
    }
  }
}

}  // namespace lode::test
