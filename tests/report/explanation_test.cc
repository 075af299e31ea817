// SPDX-License-Identifier: Apache-2.0
// What a ranking's words say of made-up rows.
#include "lab/report/explanation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace lode {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

LadderStep step(const char* label, double density, double recovered, double selector, double far_keys) {
  return {.label = label,
          .density = density,
          .recovered = recovered,
          .error = 0.1,
          .selector = selector,
          .far_keys = far_keys};
}

/// The best first, as a reading of them has it.
Ladders made_up() {
  return {
      .methods =
          {{.label = "good",
            .index = {.held = 0.25},
            .steps = {step("good:k=1", 0.04, 0.8, 0.01, 0.02), step("good:k=2", 0.08, 0.92, 0.01, 0.05),
                      step("good:k=4", 0.16, 0.99, 0.01, 0.1)}},
           {.label = "searcher",
            .index = {.held = 1.5},
            .steps = {step("searcher:k=1", 0.05, 0.6, 0.045, 0.002),
                      step("searcher:k=9", 0.2, 0.96, 0.095, 0.004)}},
           {.label = "poor",
            .steps = {step("poor:k=1", 0.05, 0.1, 0, 0.05), step("poor:k=9", 0.25, 0.55, 0, 0.25)}},
           {.label = "greedy",
            .steps = {step("greedy:k=1", 0.55, 0.97, 0.5, 0.01), step("greedy:k=2", 0.6, 0.98, 0.5, 0.02)}},
           {.label = "tiny", .steps = {step("tiny", 0.01, 0.0, NAN, 0)}}},
      .columns = {},
      .full = {}};
}

TEST(Explanation, TheOutcomeNamesTheCheapestTheBestAndTheLosers) {
  EXPECT_THAT(
      outcome_of(made_up()),
      ElementsAre(AllOf(HasSubstr("`good:k=2` keeps 92 %"),
                        HasSubstr("reads 8.0 % of full attention's bytes (1.0 % to choose, 7.0 % to attend)"),
                        HasSubstr("no method keeps 90 % for fewer")),
                  "At 10 % of the bytes `good` (94 %) and `searcher` (78 %) keep most of it.",
                  "With up to 20 % of the bytes, `poor` (49 %) and `tiny` (0 %) keep less than half."));
}

TEST(Explanation, WhereNobodyKeepsNearlyAllItSaysWhoKeepsMost) {
  Ladders ladders = made_up();
  ladders.methods.erase(ladders.methods.begin(), ladders.methods.begin() + 2);
  ladders.methods.erase(ladders.methods.begin() + 1);
  EXPECT_THAT(outcome_of(ladders).front(), HasSubstr("No method keeps 90 %"));
  EXPECT_THAT(outcome_of(ladders).front(), HasSubstr("`poor:k=9` keeps most, 55 %, and reads 25.0 %"));
  EXPECT_THAT(outcome_of({}), IsEmpty());
}

TEST(Explanation, TheLeadersAnswersStandBesideFull) {
  Ladders ladders = made_up();
  ladders.columns = {"freq 16k (context-dense)", "needle 16k (context-dense)"};
  ladders.full = {{ladders.columns[0], 80.0}, {ladders.columns[1], 100.0}};
  for (Ladder& l : ladders.methods) l.scores = {{ladders.columns[1], {{0.05, 89.0}, {0.2, 89.0}}}};
  ladders.methods[0].scores = {{ladders.columns[0], {{0.1, 60.0}}}, {ladders.columns[1], {{0.1, 90.0}}}};
  EXPECT_EQ(outcome_of(ladders).back(),
            "Asked questions at 10 % of the bytes, `good` scores 75.0 on average, full attention 90.0.");
  EXPECT_THAT(explanation_of(ladders),
              Contains("At 10 %, `searcher`, `poor`, `greedy` and `tiny` miss single "
                       "facts that full attention finds."));
  ladders.methods[0].scores.erase(ladders.columns[0]);
  EXPECT_THAT(outcome_of(ladders), Not(Contains(HasSubstr("Asked questions")))) << "no mean of half of them";
}

TEST(Explanation, RowsSayWhyTheOrderIsSo) {
  EXPECT_THAT(
      explanation_of(made_up()),
      ElementsAre(
          "`searcher` reads most to choose: 7.0 of the 10 %.",
          "At 10 %, more than half of the bytes go into choosing with `searcher` (7.0 % to choose 0.3 % of "
          "the "
          "far keys).",
          "`searcher` holds the largest index, 150 % of the bytes of the keys and values.",
          "`greedy` does not come down to 10 %: its smallest budget, `greedy:k=1`, reads 55.0 % (50.0 % "
          "to choose, 5.0 % to attend).",
          "`tiny` stays below 10 %: it reads 1.0 %."));
}

TEST(Explanation, OtherRowsGetOtherWords) {
  Ladders ladders = made_up();
  ladders.methods[1].steps = {step("searcher:k=1", 0.05, 0.6, 0.01, 0.03),
                              step("searcher:k=9", 0.2, 0.95, 0.01, 0.12)};
  ladders.methods[0].index.held = 2;
  const std::vector<std::string> words = explanation_of(ladders);
  EXPECT_THAT(words, Not(Contains(HasSubstr("more than half of the bytes"))));
  EXPECT_THAT(words, Contains(HasSubstr("`good` holds the largest index")));
}

}  // namespace
}  // namespace lode
