// SPDX-License-Identifier: Apache-2.0
// The task language: the rule that holds words back, values of every kind, templates.
#include "lab/tasks/language.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "lodestone/error.h"

namespace lode {
namespace {

const Language& language() {
  return Language::built_in();
}

TEST(Crc32, IsTheOneOfZlib) {
  EXPECT_EQ(crc32(""), 0u);
  EXPECT_EQ(crc32("123456789"), 0xcbf43926u);  // the check value that every description of CRC-32 gives
  EXPECT_EQ(crc32("The quick brown fox jumps over the lazy dog"), 0x414fa339u);
}

TEST(Fill, ReplacesSlotsAndRefusesUnknownOnes) {
  EXPECT_EQ(fill("{a} and {b}, {a}", {{"a", "x"}, {"b", "{c}"}}), "x and {c}, x");
  EXPECT_EQ(fill("none", {}), "none");
  EXPECT_THROW(fill("{a}", {}), InputError);
  EXPECT_THROW(fill("{a", {{"a", "x"}}), InputError);
}

TEST(Language, SplitListsKeepOnlyHeldOutWords) {
  for (const char* list : {"first_names", "last_names", "cities", "adjectives", "nouns"}) {
    const auto& words = language().words(list);
    EXPECT_GE(words.size(), 15u) << list;
    for (const std::string& word : words) EXPECT_EQ(crc32(word) % 4, 0u) << word;
  }
  EXPECT_EQ(language().words("professions").size(), 70u);  // a small list is not split
  EXPECT_THROW(language().words("nonsense"), InputError);
}

TEST(Language, ValuesAreHeldOutAndOfTheirShape) {
  Rng rng(1);
  for (int i = 0; i < 300; ++i) {
    EXPECT_THAT(language().value("digits4", rng), testing::MatchesRegex("[1-9][0-9][0-9][0-9]"));
    EXPECT_EQ(std::stoull(language().value("digits7", rng)) % 7, 3u);
    const std::string ten = language().value("digits10", rng);
    EXPECT_EQ(ten.size(), 10u);
    EXPECT_LE(std::set<char>(ten.begin(), ten.end()).size(), 4u);
    EXPECT_EQ(std::stoull(ten) % 7, 3u);
    const std::string hex = language().value("hex8", rng);
    EXPECT_THAT(hex, testing::MatchesRegex("[0-9a-f]+"));
    EXPECT_EQ(hex.size(), 8u);
    EXPECT_EQ(crc32(hex) % 4, 0u);
    EXPECT_EQ(crc32(language().value("variable", rng)) % 4, 0u);
    const std::string name = language().value("invented", rng);
    EXPECT_EQ(crc32(name) % 4, 0u);
    EXPECT_TRUE(name[0] >= 'A' && name[0] <= 'Z') << name;
    const std::string person = language().value("person", rng);
    const std::size_t space = person.find(' ');
    EXPECT_EQ(crc32(person.substr(0, space)) % 4, 0u) << person;
    EXPECT_EQ(crc32(person.substr(space + 1)) % 4, 0u) << person;
  }
  EXPECT_THROW(language().value("nonsense", rng), InputError);
}

TEST(Language, BooksAreHeldOutByName) {
  int held = 0;
  for (int i = 0; i < 7000; ++i) held += language().book_is_held_out("book-" + std::to_string(i) + ".txt");
  EXPECT_NEAR(held, 1000, 120);
}

TEST(Language, HeldOutWordingsDiffer) {
  Rng rng(2);
  const Json& kv = language().family("kv");
  EXPECT_NE(language().wording(kv, "facts", Language::Wording::trained, rng),
            language().wording(kv, "facts", Language::Wording::held_out, rng));
}

TEST(Language, NamesTheTasksThatAsk) {
  EXPECT_THAT(language().task_names(), testing::Contains("needle"));
  EXPECT_THAT(language().task_names(), testing::Not(testing::Contains("echo")));
  EXPECT_THROW(language().task("nonsense"), InputError);
}

TEST(Language, MalformedFilesNameTheMember) {
  EXPECT_THROW(Language::parse("[]", "x"), InputError);
  try {
    Language::parse("{}", "some.json");
    FAIL();
  } catch (const InputError& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr("some.json"), testing::HasSubstr("prompt")));
  }
}

}  // namespace
}  // namespace lode
