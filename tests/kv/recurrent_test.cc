// SPDX-License-Identifier: Apache-2.0
// States of recurrent layers: what can be gone back to, and that nothing of a text that was taken back stays.
#include "kv/recurrent.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lode {
namespace {

/// Steps whose states are all one number.
struct Steps {
  RecurrentStates states{{2, 0, 3}};

  void to(std::int64_t tokens, float value) {
    for (const int layer : {0, 2}) std::ranges::fill(states.after(layer), value);
    states.commit(tokens);
  }
  float value() const {
    EXPECT_EQ(states.before(0)[1], states.before(2)[2]);
    return states.before(0)[1];
  }
};

TEST(RecurrentStates, GoBackToWhatWasKeptAndForgetWhatCameAfter) {
  Steps s;
  EXPECT_EQ(s.value(), 0.0f);
  for (int i = 1; i <= 3; ++i) {
    s.to(10 * i, static_cast<float>(i));
    s.states.keep();
  }
  s.to(40, 4.0f);
  for (const auto& [tokens, reached] :
       {std::pair<int, int>{40, 40}, {39, 30}, {30, 30}, {29, 20}, {10, 10}, {9, 0}})
    EXPECT_EQ(s.states.reachable(tokens), reached) << tokens;
  s.states.roll_back(20);
  EXPECT_EQ(s.value(), 2.0f);
  s.to(25, 5.0f);  // another text
  s.to(45, 6.0f);
  EXPECT_EQ(s.states.reachable(30), 20) << "the state at 30 was of the text that was taken back";
  EXPECT_EQ(s.states.kept(), (std::vector<std::int64_t>{10, 20, 45}));
  s.states.roll_back(10);
  EXPECT_EQ(s.value(), 1.0f);
  s.states.roll_back(0);
  EXPECT_EQ(s.value(), 0.0f);
}

TEST(RecurrentStates, AStepThatIsGivenUpLeavesThemAsTheyWere) {
  Steps s;
  s.to(10, 1.0f);
  std::ranges::fill(s.states.after(0), 9.0f);
  EXPECT_EQ(s.value(), 1.0f);
  s.to(20, 2.0f);
  EXPECT_EQ(s.value(), 2.0f);
}

TEST(RecurrentStates, AreKeptSparselyTheNewestAmongThem) {
  Steps s;
  for (int i = 1; i <= 100; ++i) {
    s.to(i, static_cast<float>(i));
    s.states.keep();
    EXPECT_EQ(s.states.reachable(i), i);
  }
  const std::vector<std::int64_t> kept = s.states.kept();
  EXPECT_LE(std::ssize(kept), static_cast<std::ptrdiff_t>(RecurrentStates::kMost) + 1);
  for (const std::int64_t tokens : kept) EXPECT_EQ(s.states.at(tokens)[0], static_cast<float>(tokens));
}

TEST(RecurrentStates, ABranchBeginsWithTheDocumentsAndLeavesThemAlone) {
  Steps document, branch;
  document.to(10, 1.0f);
  branch.states.branch_from(document.states);
  EXPECT_EQ(branch.value(), 1.0f);
  branch.to(5, 2.0f);
  branch.to(6, 3.0f);
  EXPECT_EQ(document.value(), 1.0f);
  branch.states.roll_back(0);
  EXPECT_EQ(branch.value(), 1.0f) << "its own first token stands behind the document";
}

}  // namespace
}  // namespace lode
