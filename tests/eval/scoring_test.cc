// SPDX-License-Identifier: Apache-2.0
// Scores of outputs, case by case.
#include "eval/scoring.h"

#include <gtest/gtest.h>

namespace lode {
namespace {

double of(std::string_view output, Match match, std::vector<std::string> answers) {
  Sample sample;
  sample.match = match;
  sample.answers = std::move(answers);
  return score(output, sample);
}

TEST(Contains, IsTheShareOfAnswersInTheOutput) {
  EXPECT_EQ(of(" 48213", Match::contains, {"48213"}), 1.0);
  EXPECT_EQ(of("It is 48213.", Match::contains, {"48213"}), 1.0);
  EXPECT_EQ(of("4821", Match::contains, {"48213"}), 0.0);
  EXPECT_EQ(of("", Match::contains, {"48213"}), 0.0);
  EXPECT_EQ(of("lisbon", Match::contains, {"Lisbon"}), 1.0);
  EXPECT_DOUBLE_EQ(of("1111, 3333", Match::contains, {"1111", "2222", "3333"}), 2.0 / 3.0);
}

TEST(Exact, IgnoresOnlyTheSpaceAround) {
  EXPECT_EQ(of(" A = B = 1 \n", Match::exact, {"A = B = 1"}), 1.0);
  EXPECT_EQ(of("A = B = 12", Match::exact, {"A = B = 1"}), 0.0);
  EXPECT_EQ(of("a = b = 1", Match::exact, {"A = B = 1"}), 0.0);
  EXPECT_EQ(of("two", Match::exact, {"one", "two"}), 1.0);
}

TEST(F1, CountsWordsAsSquadDoes) {
  EXPECT_EQ(of("The cat!", Match::f1, {"a cat"}), 1.0);
  EXPECT_DOUBLE_EQ(of("black cat", Match::f1, {"cat"}), 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(of("cat cat cat", Match::f1, {"cat"}), 0.5);
  EXPECT_EQ(of("dog", Match::f1, {"cat", "dog"}), 1.0);
  EXPECT_EQ(of("", Match::f1, {"cat"}), 0.0);
  EXPECT_EQ(of("the", Match::f1, {"a"}), 1.0);
  EXPECT_EQ(of("\u00c9t\u00e9", Match::f1, {"\u00c9t\u00e9"}), 1.0);
}

}  // namespace
}  // namespace lode
