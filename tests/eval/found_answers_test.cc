// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/found_answers.h"

#include <gtest/gtest.h>

namespace lode {
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
  EXPECT_EQ(answers.kept(bits("0110100111")), 1.0) << "what the window finds, too, does not count";
  EXPECT_EQ(answers.kept(bits("0111110110")), 0.5);
  EXPECT_EQ(answers.kept(bits("0011110110")), 0.0);
}

TEST(FoundAnswers, OfNoneThereIsNoShare) {
  EXPECT_FALSE(FoundAnswers(bits("000"), bits("101")).kept(bits("101")));
  EXPECT_FALSE(FoundAnswers({}, {}).kept({}));
}

}  // namespace
}  // namespace lode
