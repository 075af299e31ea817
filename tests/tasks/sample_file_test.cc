// SPDX-License-Identifier: Apache-2.0
// Sample files: what is written is read back; a malformed line is refused with its number.
#include "lab/tasks/sample_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lodestone/error.h"

namespace lode {
namespace {

std::string line(const std::string& id, const std::string& more) {
  return R"({"id": ")" + id +
         R"(", "task": "needle", "tokens": 4096, "question": "Q?", "answers": ["a"], "match": "contains", )" +
         more + "}\n";
}

std::string error_of(const std::string& text) {
  try {
    parse_samples(text, "file.jsonl");
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

TEST(SampleFile, RoundTrip) {
  Sample s = {.id = "x-1",
              .task = "qa",
              .tokens = 8192,
              .context_id = "c",
              .context = std::make_shared<std::string>("Text \"here\".\n\u00e9"),
              .question = "\n\nWho?",
              .answers = {"A", "B"},
              .match = Match::exact,
              .depth = 0.25,
              .max_new = 64,
              .first_line = true,
              .verbatim = true,
              .length = 8190};
  Sample second = s;
  second.id = "x-2";
  const auto read = parse_samples(sample_line(s, true) + "\n\n" + sample_line(second, false) + "\r\n", "f");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(sample_line(read[0], true), sample_line(s, true));
  EXPECT_EQ(*read[1].context, *s.context);
  EXPECT_EQ(read[0].context, read[1].context) << "one copy in memory";
  EXPECT_EQ(read[1].match, Match::exact);
  EXPECT_EQ(read[1].depth, 0.25);
  EXPECT_EQ(parse_samples(line("a", R"("context": "t", "depth": -1)"), "x")[0].depth, std::nullopt)
      << "unknown";
  EXPECT_TRUE(read[1].first_line);
  EXPECT_TRUE(read[1].verbatim);
}

// Else each question about a book would count as a book in intervals, and the book be read for each.
TEST(SampleFile, EqualContextsAreOneDocument) {
  const auto samples =
      parse_samples(line("a", R"("context": "t")") + line("b", R"("context": "u")") +
                        line("c", R"("context": "t")") + line("d", R"("context_id": "i", "context": "t")") +
                        line("e", R"("context": "")") + line("f", R"("context": "")"),
                    "f");
  ASSERT_EQ(samples.size(), 6u);
  EXPECT_EQ(samples[0].context, samples[2].context);
  EXPECT_EQ(samples[0].context, samples[3].context);
  EXPECT_NE(samples[0].context, samples[1].context);
  EXPECT_NE(samples[4].context, samples[5].context) << "without a context they have none in common";
}

TEST(SampleFile, FieldsOfOthersAreIgnored) {
  EXPECT_EQ(parse_samples(line("a", R"("context": "t", "index": 5, "source": {"book": 1})"), "f").size(), 1u);
}

TEST(SampleFile, LimitCountsEachTaskAndLength) {
  std::string text;
  for (int i = 0; i < 5; ++i) text += line("a" + std::to_string(i), R"("context": "t")");
  text +=
      R"({"id": "k", "task": "kv", "tokens": 4096, "context": "t", "question": "Q?", "answers": ["a"], "match": "f1"})";
  EXPECT_EQ(parse_samples(text, "f", 2).size(), 3u);
  EXPECT_EQ(parse_samples(text, "f").size(), 6u);
}

TEST(SampleFile, ErrorsNameFileLineAndReason) {
  const std::string good = line("good", R"("context": "t")");
  using testing::AllOf, testing::HasSubstr;
  EXPECT_THAT(error_of(""), HasSubstr("empty file"));
  EXPECT_THAT(error_of("\n \n"), HasSubstr("found none"));
  EXPECT_THAT(error_of(good + "\n{"), AllOf(HasSubstr("file.jsonl line 3")));
  EXPECT_THAT(error_of(good + "[1]"), AllOf(HasSubstr("line 2"), HasSubstr("array")));
  EXPECT_THAT(error_of(good + good), AllOf(HasSubstr("line 2"), HasSubstr("twice")));
  EXPECT_THAT(error_of(line("a", R"("x": 1)")), AllOf(HasSubstr("line 1"), HasSubstr("context")));
  EXPECT_THAT(error_of(line("a", R"("context_id": "c7")")), AllOf(HasSubstr("line 1"), HasSubstr("c7")));
  EXPECT_THAT(error_of(line("a", R"("context_id": "c", "context": "t")") +
                       line("b", R"("context_id": "c", "context": "u")")),
              AllOf(HasSubstr("line 2"), HasSubstr("another context")));
  EXPECT_THAT(error_of(line("a", R"("context": "t", "depth": 1.5)")),
              AllOf(HasSubstr("line 1"), HasSubstr("depth")));
  EXPECT_THAT(error_of(R"({"id": "a"})"), AllOf(HasSubstr("line 1"), HasSubstr("task")));
  EXPECT_THAT(error_of(R"({"id": "a", "task": "t", "tokens": -1})"),
              AllOf(HasSubstr("line 1"), HasSubstr("tokens")));
  const std::string start = R"({"id": "a", "task": "t", "tokens": 1, "question": "q", "context": "c", )";
  EXPECT_THAT(error_of(start + R"("answers": [], "match": "exact"})"), HasSubstr("answers"));
  EXPECT_THAT(error_of(start + R"("answers": [""], "match": "exact"})"), HasSubstr("answers"));
  EXPECT_THAT(error_of(start + R"("answers": "a", "match": "exact"})"), HasSubstr("answers"));
  EXPECT_THAT(error_of(start + R"("answers": ["a"], "match": "fuzzy"})"),
              AllOf(HasSubstr("match"), HasSubstr("fuzzy")));
  EXPECT_THAT(error_of(start + "\"answers\": [\"\xff\"], \"match\": \"exact\"}"), HasSubstr("line 1"));
}

}  // namespace
}  // namespace lode
