// SPDX-License-Identifier: Apache-2.0
// Documents that selectors are trained on: of the length asked for, made of the texts, with questions at the end whose
// answers stand far before, of words that evaluation does not use; texts that cannot teach are said.
#include "lab/train/lessons.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>

#include "lab/tasks/language.h"
#include "lab/tasks/prose.h"
#include "lodestone/error.h"
#include "lodestone/tokenizer.h"
#include "support/source_dir.h"

namespace lode::test {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer t = Tokenizer::read(source_dir() / "models" / "pocket");
  return t;
}

std::vector<std::string> texts() {
  return {make_prose(1, 120'000), make_prose(2, 120'000)};
}

std::string text_of(const Prompt& lesson) {
  return tokenizer().decode(lesson.tokens);
}

TEST(Lessons, HaveTheirLengthAndEndWithQuestionsAboutTheirText) {
  const LessonOptions options = {.tokens = 4096, .count = 6, .held_out = 1, .seed = 4};
  const std::vector<Prompt> lessons = make_lessons(tokenizer(), texts(), options);
  ASSERT_EQ(lessons.size(), 6u);
  int told = 0;
  std::set<std::string> different;
  for (const Prompt& lesson : lessons) {
    EXPECT_LE(std::ssize(lesson.tokens), options.tokens);
    EXPECT_GT(std::ssize(lesson.tokens), options.tokens - 64);
    const std::string text = text_of(lesson);
    different.insert(text);
    const std::size_t header = text.find(Language::built_in().prompt().header);
    ASSERT_NE(header, std::string::npos);
    const std::string context = text.substr(0, header), end = text.substr(header);
    // Numbers that are given as answers were told.
    const std::regex answer("Answer: ([0-9]{4,})\n");
    for (std::sregex_iterator i(end.begin(), end.end(), answer), none; i != none; ++i, ++told)
      EXPECT_NE(context.find((*i)[1].str()), std::string::npos) << (*i)[1];
    // A passage of the text comes back.
    int copies = 0;
    for (std::size_t at = 0; (at = end.find("\n\n", at)) != std::string::npos; at += 2) {
      const std::string one = end.substr(at + 2, 60);
      copies += one.size() == 60 && !one.starts_with("Question") && context.find(one) != std::string::npos;
    }
    EXPECT_GE(copies, 1);
  }
  EXPECT_GE(told, 3);
  EXPECT_EQ(different.size(), 6u);
  EXPECT_EQ(text_of(make_lessons(tokenizer(), texts(), options)[1]), text_of(lessons[1])) << "of a seed";
}

TEST(Lessons, AsTextAreReadAsTheSameTokens) {
  const std::vector<Prompt> lessons =
      make_lessons(tokenizer(), texts(), {.tokens = 2048, .count = 3, .seed = 5});
  const std::vector<std::string> plain = texts_of(tokenizer(), lessons);
  ASSERT_EQ(plain.size(), lessons.size());
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_EQ(tokenizer().encode(plain[i], Tokenizer::Bos::as_template), lessons[i].tokens);
  Prompt cut = {.source = "cut",
                .tokens = tokenizer().encode("a word, \xe5\x8e\xbb", Tokenizer::Bos::as_template)};
  ASSERT_GT(cut.tokens.size(), tokenizer().encode("a word, ", Tokenizer::Bos::as_template).size() + 1);
  cut.tokens.pop_back();
  EXPECT_EQ(texts_of(tokenizer(), {cut}).front(), "a word, ") << "half a character";
}

// What is tested on is no text that was trained on.
TEST(Lessons, ThoseThatAreHeldOutAreMadeOfTheTextsEnd) {
  std::string early, late;
  for (int i = 0; i < 3000; ++i)
    early += "The early bird number " + std::to_string(i) + " sang in the morning air. ";
  for (int i = 0; i < 1500; ++i)
    late += "The late owl number " + std::to_string(i) + " called in the evening mist. ";
  const auto lessons =
      make_lessons(tokenizer(), {early, late}, {.tokens = 2048, .count = 10, .held_out = 2, .seed = 1});
  const auto has = [&](std::size_t i, const char* words) {
    return text_of(lessons[i]).find(words) != std::string::npos;
  };
  for (const std::size_t i : {8, 9}) {
    EXPECT_TRUE(has(i, "The late owl"));
    EXPECT_FALSE(has(i, "The early bird"));
  }
  EXPECT_TRUE(has(0, "The early bird") || has(1, "The early bird"));
}

TEST(Lessons, DrawWhatEvaluationDoesNotUse) {
  const Language& taught = Language::built_in(Language::Side::trained);
  Rng rng(1);
  for (int i = 0; i < 200; ++i) {
    EXPECT_FALSE(taught.string_is_held_out(taught.value("hex8", rng)));
    EXPECT_FALSE(taught.number_is_held_out(std::stoull(taught.value("digits7", rng))));
    EXPECT_FALSE(taught.word_is_held_out(taught.word("city", rng)));
  }
}

TEST(Lessons, TextsThatHoldNoneAreRefused) {
  const auto refusal = [](const std::vector<std::string>& given,
                          const LessonOptions& options) -> std::string {
    try {
      make_lessons(tokenizer(), given, options);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(refusal({"Too short."}, {.tokens = 4096, .count = 2}), testing::HasSubstr("give more text"));
  EXPECT_THAT(refusal({make_prose(1, 60'000)}, {.tokens = 4096, .count = 10, .held_out = 1}),
              testing::HasSubstr("held out"));
  EXPECT_THAT(refusal(texts(), {.tokens = 1000, .count = 2}), testing::HasSubstr("--lessons off"));
}

TEST(Lessons, DoubtsAreSaidBeforehand) {
  EXPECT_TRUE(doubts_about(tokenizer(), texts(), 10'000).empty());
  EXPECT_THAT(doubts_about(tokenizer(), texts(), 10'000'000),
              testing::ElementsAre(testing::HasSubstr("by heart")));
  EXPECT_THAT(doubts_about(tokenizer(), {texts()[0]}, 1000),
              testing::ElementsAre(testing::HasSubstr("one text")));
  std::string table;
  for (int i = 0; i < 4000; ++i) table += "row;12;ok;17\n";
  EXPECT_THAT(doubts_about(tokenizer(), {table, texts()[0]}, 1000), testing::IsEmpty());
  EXPECT_THAT(doubts_about(tokenizer(), {table, table}, 1000),
              testing::ElementsAre(testing::HasSubstr("repeats"), testing::HasSubstr("sentences")));
}

// Texts without sentences teach by what is copied.
TEST(Lessons, OfCodeOrTables) {
  std::string code;
  for (int i = 0; i < 6000; ++i)
    code += "int f" + std::to_string(i) + "(int x) { return x * " + std::to_string(i * 7919 % 1000) + "; }\n";
  const auto lessons = make_lessons(tokenizer(), {code}, {.tokens = 2048, .count = 2});
  EXPECT_GT(std::ssize(lessons[0].tokens), 1900);
}

}  // namespace
}  // namespace lode::test
