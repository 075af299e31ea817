// SPDX-License-Identifier: Apache-2.0
// Tasks over the whole text: what is asked is counted again from the facts as they stand there.
#include "lab/tasks/whole_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <regex>

#include "base/text.h"

namespace lode {
namespace {

/// People by place, in the order of the text.
std::map<std::string, std::vector<std::string>> seen(const Material& material) {
  static const std::regex kFact("(.+) was seen in (.+) that day\\.");
  std::map<std::string, std::vector<std::string>> people;
  for (const std::string& fact : material.facts) {
    std::smatch parts;
    EXPECT_TRUE(std::regex_match(fact, parts, kFact)) << fact;
    people[parts[2]].push_back(parts[1]);
  }
  return people;
}

class WholeText : public testing::TestWithParam<int> {
 protected:
  Material make(const char* task) {
    Rng rng(static_cast<std::uint64_t>(GetParam()));
    std::set<std::string> names;
    const auto facts = static_cast<std::size_t>(4 + 7 * GetParam());
    Material material = sightings(Language::built_in(), task, facts, Language::Wording::trained, rng, names);
    EXPECT_EQ(material.facts.size(), facts);
    EXPECT_GE(material.questions.size(), 1u);
    return material;
  }
};

std::smatch parsed(const std::string& text, const char* pattern) {
  static std::string kept;
  kept = text;
  std::smatch parts;
  EXPECT_TRUE(std::regex_match(kept, parts, std::regex(pattern))) << text;
  return parts;
}

TEST_P(WholeText, CountsAndNamesAreThoseOfTheFacts) {
  const Material counted = make("count");
  auto people = seen(counted);
  for (const Question& q : counted.questions) {
    const std::string city = parsed(q.text, "How many people were seen in (.+) that day\\?")[1];
    EXPECT_EQ(q.answer, std::to_string(people.at(city).size()));
    EXPECT_EQ(q.needs.size(), people.at(city).size());
  }
  const Material listed = make("listing");
  people = seen(listed);
  EXPECT_EQ(listed.questions.size(), people.size());
  for (const Question& q : listed.questions) {
    const std::string city = parsed(q.text, "Who was seen in (.+) that day\\? Name all of them\\.")[1];
    EXPECT_EQ(q.answers, people.at(city));
  }
}

TEST_P(WholeText, WhatIsDeniedIsNotThere) {
  const Material material = make("denial");
  const auto people = seen(material);
  for (const Question& q : material.questions) {
    const auto parts = parsed(q.text, "Was (.+) seen in (.+) that day\\?");
    const auto& there = people.at(parts[2]);
    const bool found = std::find(there.begin(), there.end(), parts[1].str()) != there.end();
    EXPECT_EQ(q.answer, found ? "yes" : "no");
  }
}

TEST_P(WholeText, TheLargerPlaceIsNamed) {
  Rng rng(static_cast<std::uint64_t>(GetParam()));
  std::set<std::string> names;
  const Material material =
      sightings(Language::built_in(), "comparison", 60, Language::Wording::trained, rng, names);
  const auto people = seen(material);
  EXPECT_FALSE(material.questions.empty());
  for (const Question& q : material.questions) {
    const auto parts = parsed(q.text, "Were more people seen in (.+) or in (.+) that day\\?");
    const std::size_t first = people.at(parts[1]).size(), second = people.at(parts[2]).size();
    EXPECT_NE(first, second);
    EXPECT_EQ(q.answer, first > second ? parts[1] : parts[2]);
  }
}

TEST(WholeTextTasks, AnswersAreNotOfOneKind) {
  std::map<std::string, int> denials;
  for (int seed = 0; seed < 20; ++seed) {
    Rng rng(static_cast<std::uint64_t>(seed));
    std::set<std::string> names;
    for (const Question& q :
         sightings(Language::built_in(), "denial", 40, Language::Wording::trained, rng, names).questions)
      ++denials[q.answer];
  }
  EXPECT_GT(denials["yes"] * 2, denials["no"]);
  EXPECT_GT(denials["no"] * 2, denials["yes"]);
}

INSTANTIATE_TEST_SUITE_P(Seeds, WholeText, testing::Range(0, 8));

}  // namespace
}  // namespace lode
