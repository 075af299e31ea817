// SPDX-License-Identifier: Apache-2.0
// Scores of outputs, case by case.
#include "lab/eval/scoring.h"

#include <gtest/gtest.h>

namespace lode {
namespace {

double of(std::string_view output, Match match, std::vector<std::string> answers,
          std::vector<std::string> classes = {}) {
  Sample sample;
  sample.match = match;
  sample.answers = std::move(answers);
  sample.classes = std::move(classes);
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

TEST(Contains, WantsWholeWords) {
  EXPECT_EQ(of(" flute. The instr", Match::contains, {"lute"}), 0.0);
  EXPECT_EQ(of("a flute, then a Lute.", Match::contains, {"lute"}), 1.0);
  EXPECT_EQ(of("cloud, table", Match::contains, {"loud", "able"}), 0.0);
  EXPECT_EQ(of("148213", Match::contains, {"48213"}), 0.0);
  EXPECT_EQ(of("two lutes", Match::contains, {"lute"}), 0.0);
  EXPECT_EQ(of("\"lute\"", Match::contains, {"lute"}), 1.0);
  EXPECT_EQ(of("\u7b54\u6848\u662f\u6771\u4eac\u3002", Match::contains, {"\u6771\u4eac"}), 1.0)
      << "no script parts words alike";
  EXPECT_EQ(of(" flute", Match::substring, {"lute"}), 1.0);
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
  EXPECT_EQ(of("the", Match::f1, {"a"}), 0.0) << "no word is common to two empty lists";
  EXPECT_EQ(of("\u00c9t\u00e9", Match::f1, {"\u00c9t\u00e9"}), 1.0);
}

TEST(FirstLine, IsTheFirstThatIsNotEmpty) {
  Sample sample;
  sample.match = Match::f1;
  sample.first_line = true;
  sample.answers = {"Food"};
  EXPECT_EQ(score("\n\nFood\nQuestion: and another one", sample), 1.0);
  EXPECT_EQ(score("Food", sample), 1.0);
  EXPECT_EQ(score("City\nFood", sample), 0.0);
  EXPECT_EQ(score("\n\n", sample), 0.0);
  EXPECT_EQ(score("", sample), 0.0);
  sample.first_line = false;
  EXPECT_LT(score("\n\nFood\nQuestion: and another one", sample), 1.0);
}

TEST(Any, IsOneWhenAnAnswerIsThere) {
  EXPECT_EQ(of("It was PARIS.", Match::any, {"London", "Paris"}), 1.0);
  EXPECT_EQ(of("It was Rome.", Match::any, {"London", "Paris"}), 0.0);
}

TEST(Number, IsTheFirstOfTheOutput) {
  EXPECT_EQ(of("The key: 71432, not 5.", Match::number, {"71432"}), 1.0);
  EXPECT_EQ(of("5 or 71432", Match::number, {"71432"}), 0.0);
  EXPECT_EQ(of("", Match::number, {"71432"}), 0.0);
}

TEST(Decimal, IsTheFirstOfTheOutputWithItsFraction) {
  EXPECT_EQ(of("It is 8.67, not 9.", Match::decimal, {"8.67"}), 1.0);
  EXPECT_EQ(of("61.", Match::decimal, {"61"}), 1.0) << "a full stop is no fraction";
  EXPECT_EQ(of("3", Match::decimal, {"3.0"}), 1.0);
  EXPECT_EQ(of("3.0", Match::decimal, {"3"}), 0.0) << "the authors' int() refuses it";
  EXPECT_EQ(of("9 or 61", Match::decimal, {"61"}), 0.0);
  EXPECT_EQ(of("none", Match::decimal, {"61"}), 0.0);
}

TEST(Debug, IsALetterWithItsMarkOrWhatStandsBehindALead) {
  const std::vector<std::string> answer = {"read_row", "B"};
  for (const char* right :
       {"B. read_row", "B:", "The answer is: B", "I think the bug is: `read_row`", "answer:  Option B"})
    EXPECT_EQ(of(right, Match::debug, answer), 1.0) << right;
  for (const char* wrong : {"", "B", "C. read_row", "answer:", "The answer is: C", "read_row"})
    EXPECT_EQ(of(wrong, Match::debug, answer), 0.0) << wrong;
}

TEST(Word, StandsApartFromPunctuation) {
  EXPECT_EQ(of("{\"v\": \"ab-12\"}", Match::word, {"ab-12"}), 1.0);
  EXPECT_EQ(of("ab-123", Match::word, {"ab-12"}), 0.0);
}

TEST(Choice, IsWhatTheOutputNames) {
  const std::vector<std::string> answer = {"Ann", "B"};
  for (const char* right :
       {"B", "B. Ann", " The answer is: B", "the answer is Ann", "I take B .", "Bob is C"})
    EXPECT_EQ(of(right, Match::choice, answer), 1.0) << right;
  for (const char* wrong : {"", "A", "The answer is: C", "none", "answer:", "so D it is, not B"})
    EXPECT_EQ(of(wrong, Match::choice, answer), 0.0) << wrong;
}

TEST(RougeL, CountsCommonWordsInOrderOnce) {
  // Common: the, cat, sat (3) of 4 and 3 different words: 2 * 3 / 7.
  EXPECT_NEAR(of("the cat sat down", Match::rouge_l, {"the cat sat"}), 6.0 / 7.0, 1e-12);
  // Order counts within a sentence: of "b a" and "a b" one word is common.
  EXPECT_NEAR(of("b a", Match::rouge_l, {"a b"}), 0.5, 1e-12);
  // Two sentences of the output share a and b with the one of the answer.
  EXPECT_NEAR(of("b. a", Match::rouge_l, {"a b"}), 1.0, 1e-12);
  EXPECT_EQ(of("", Match::rouge_l, {"a"}), 0.0);
  EXPECT_EQ(of("...", Match::rouge_l, {"a"}), 0.0);
}

TEST(Classes, ShareTheScoreAmongThoseNamed) {
  const std::vector<std::string> all = {"City", "Other city", "Food"};
  EXPECT_EQ(of("Food", Match::classes, {"Food"}, all), 1.0);
  EXPECT_EQ(of("Food or City", Match::classes, {"Food"}, all), 0.5);
  EXPECT_EQ(of("City", Match::classes, {"Food"}, all), 0.0);
  EXPECT_EQ(of("nothing", Match::classes, {"Food"}, all), 0.0);
}

TEST(Count, IsTheShareOfRightNumbers) {
  EXPECT_EQ(of("12, or 12, or 7, or 9", Match::count, {"12"}), 0.5);
  EXPECT_EQ(of("twelve", Match::count, {"12"}), 0.0);
  EXPECT_EQ(of("Paragraph 12", Match::passage, {"Paragraph 12"}), 1.0);
  EXPECT_EQ(of("1 or 12", Match::passage, {"Paragraph 12"}), 0.5);
}

TEST(Code, IsTheLikenessOfTheFirstLineOfCode) {
  EXPECT_EQ(of("\n\n# note\nreturn x;\nmore", Match::code, {"return x;"}), 1.0);
  EXPECT_EQ(of("# note\n\nreturn x;", Match::code, {"return x;"}), 0.0) << "the authors take the empty line";
  // "abcd" and "abed": three common of eight in all: 0.75.
  EXPECT_EQ(of("abcd", Match::code, {"abed"}), 0.75);
  EXPECT_EQ(of("", Match::code, {"abcd"}), 0.0);
}

}  // namespace
}  // namespace lode
