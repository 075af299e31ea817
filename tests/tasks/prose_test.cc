// SPDX-License-Identifier: Apache-2.0
// The built-in prose: clean, seeded, varied, and nothing in it that a task could mistake for a fact.
#include "lab/tasks/prose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/text.h"

namespace lode {
namespace {

std::vector<std::string> split(const std::string& text, const std::string& at) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find(at, begin)) != text.npos; begin = end + at.size())
    parts.push_back(text.substr(begin, end - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

TEST(Prose, SeedDecidesEverything) {
  EXPECT_EQ(make_prose(1, 50'000), make_prose(1, 50'000));
  EXPECT_NE(make_prose(1, 5'000).substr(0, 2000), make_prose(2, 5'000).substr(0, 2000));
  EXPECT_EQ(make_prose(1, 50'000).substr(0, 5000), make_prose(1, 5'000).substr(0, 5000))
      << "longer prose begins alike";
  EXPECT_GE(make_prose(3, 0).size(), 100u);
}

TEST(Prose, IsCleanText) {
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    const std::string text = make_prose(seed, 300'000);
    EXPECT_EQ(invalid_utf8(text), std::string::npos);
    EXPECT_EQ(text.find_first_of("{}0123456789\t\r"), std::string::npos) << "numbers would look like needles";
    for (const char* bad :
         {"  ", " a a", " a e", " a i", " ,", " .", "..", "\n\n\n", "the the ", "The the "}) {
      EXPECT_EQ(text.find(bad), std::string::npos) << bad << ": " << text.substr(text.find(bad) - 40, 80);
    }
    for (const std::string& paragraph : split(text, "\n\n")) {
      EXPECT_TRUE((paragraph[0] >= 'A' && paragraph[0] <= 'Z') || paragraph[0] == '"') << paragraph;
      EXPECT_THAT(std::string(1, paragraph.back()), testing::AnyOf(".", "\"", "?", "!")) << paragraph;
      EXPECT_GE(paragraph.size(), 150u);
    }
  }
}

TEST(Prose, SentencesSeldomRepeat) {
  const std::string text = make_prose(9, 200'000);
  std::map<std::string, int> counts;
  std::size_t sentences = 0, repeated = 0;
  for (const std::string& paragraph : split(text, "\n\n")) {
    for (const std::string& sentence : split(paragraph, ". ")) {
      ++sentences;
      repeated += counts[sentence]++ > 0;
    }
  }
  EXPECT_GT(sentences, 1500u);
  EXPECT_LT(static_cast<double>(repeated) / static_cast<double>(sentences), 0.35);
  for (const auto& [sentence, n] : counts) EXPECT_LE(n, 14) << sentence;
}

}  // namespace
}  // namespace lode
