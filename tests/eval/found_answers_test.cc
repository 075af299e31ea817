// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/found_answers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/source_dir.h"

namespace lode::test {
namespace {

std::vector<bool> bits(const char* text) {
  std::vector<bool> all;
  for (; *text; ++text) all.push_back(*text == '1');
  return all;
}

TEST(FoundAnswers, WhatFullAttentionMissesStandsBetweenThem) {
  EXPECT_EQ(FoundAnswers(bits("0110100111"), bits("0111110111")).count(), 2u);
  EXPECT_EQ(FoundAnswers(bits("0110100111"), bits("1111111111")).count(), 1u);
  EXPECT_EQ(FoundAnswers(bits("1001"), bits("1001")).count(), 2u);
}

TEST(FoundAnswers, OneLostTokenSpoilsAnAnswer) {
  const FoundAnswers answers(bits("0110100111"), bits("0111110111"));
  EXPECT_EQ(answers.kept(bits("0111110111")), 1.0);
  EXPECT_EQ(answers.kept(bits("1111100111")), 1.0) << "what stands outside of them does not count";
  EXPECT_EQ(answers.kept(bits("0111110110")), 0.5);
  EXPECT_EQ(answers.kept(bits("0011110110")), 0.0);
  EXPECT_EQ(answers.kept(bits("0110110111")), 0.5) << "inside of an answer all counts";
}

TEST(FoundAnswers, ThatAreKnownCountIfWhollyRightAndPartlyFound) {
  const std::vector<TokenStretch> known = {{0, 3}, {3, 6}, {6, 8}};
  const FoundAnswers answers(bits("01100001"), bits("11011111"), known);
  EXPECT_EQ(answers.count(), 1u) << "of the first full attention misses a token, of the second none is found";
  EXPECT_EQ(answers.kept(bits("00000011")), 1.0);
  EXPECT_EQ(answers.kept(bits("11111101")), 0.0);
}

TEST(FoundAnswers, OfNoneThereIsNoShare) {
  EXPECT_FALSE(FoundAnswers(bits("000"), bits("101")).kept(bits("101")));
  EXPECT_FALSE(FoundAnswers({}, {}).kept({}));
}

/// The tokens' texts from begin to end.
std::string text_of(const Tokenizer& tokenizer, std::span<const TokenId> tokens, TokenStretch stretch) {
  return tokenizer.decode(tokens.subspan(stretch.begin, stretch.end - stretch.begin));
}

TEST(FoundAnswers, StandBetweenTheirMarks) {
  const Tokenizer tokenizer = Tokenizer::read(source_dir() / "models" / "pocket");
  const std::vector<TokenId> tokens = tokenizer.encode(
      " cut off.\n\nQuestion: Who?\nAnswer: Anna Lee\n\nAnswer: 1.\n\nQuestion: Which?\nAnswer: an",
      Tokenizer::Bos::none);
  const std::vector<TokenStretch> answers = answers_between({"\nAnswer:", "\n\n"}, tokenizer, tokens);
  ASSERT_EQ(answers.size(), 2u) << "the last has no end";
  EXPECT_THAT(text_of(tokenizer, tokens, answers[0]), testing::MatchesRegex(" Anna Lee\n+")) << "and its end";
  EXPECT_THAT(text_of(tokenizer, tokens, answers[1]), testing::MatchesRegex(" 1.\n+"));
}

}  // namespace
}  // namespace lode::test
