// SPDX-License-Identifier: Apache-2.0
// Published formats, on small files of their shape of our own making.
#include "lab/tasks/datasets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/text.h"
#include "lab/eval/scoring.h"
#include "lodestone/error.h"
#include "support/refusal.h"

namespace lode {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class DatasetTest : public testing::Test {
 protected:
  fs::path write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  std::vector<Sample> read(const std::string& name, const std::string& text) const {
    return read_dataset(write(name, text), DatasetFormat::automatic, 0).samples;
  }
  std::string error_of(const std::string& name, const std::string& text,
                       DatasetFormat format = DatasetFormat::automatic) const {
    try {
      read_dataset(write(name, text), format, 0);
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  }
  const test::TestFolder folder_;
};

TEST_F(DatasetTest, RulerIsCutBeforeItsLastQuestion) {
  const auto samples = read(
      "niah_multivalue/validation.jsonl",
      R"({"index": 0, "input": "Some text.\nWhat are the numbers?", "outputs": ["12", "34"], "length": 4081, "answer_prefix": " They are"})"
      "\n"
      R"({"index": 1, "input": "An example.\nQuestion: a?\nMore.\nQuestion: b?", "outputs": ["12"], "length": 8192})"
      "\n"
      R"({"index": 2, "input": "A text.\nWhat?", "outputs": ["12"], "length": 4097})"
      "\n"
      R"({"index": 3, "input": "A text.\nWhat?", "outputs": ["12"], "length": 0})");
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[0].task, "niah_multivalue");
  EXPECT_EQ(*samples[0].context, "Some text.");
  EXPECT_EQ(samples[0].question, "\nWhat are the numbers? They are");
  EXPECT_THAT(samples[0].answers, ElementsAre("12", "34"));
  EXPECT_EQ(samples[0].match, Match::substring);
  EXPECT_EQ(samples[0].tokens, 4096) << "the length that the file was made for, not the sample's own";
  EXPECT_EQ(samples[1].tokens, 8192);
  EXPECT_EQ(samples[2].tokens, 8192);
  EXPECT_EQ(samples[3].tokens, 0);
  EXPECT_EQ(samples[0].max_new, 128);
  EXPECT_EQ(samples[1].question, "\nQuestion: b?");
  EXPECT_EQ(read("qa_1.jsonl", R"({"input": "t", "outputs": ["x", "y"]})")[0].match, Match::any);
}

TEST_F(DatasetTest, InfiniteBenchTakesItsTaskFromTheFile) {
  const auto passkey = read(
      "passkey.jsonl",
      R"({"id": 0, "context": "c", "input": "What is the pass key?", "answer": ["71432"], "options": []})");
  EXPECT_EQ(passkey[0].match, Match::number);
  EXPECT_THAT(passkey[0].answers, ElementsAre("71432"));
  const auto choice =
      read("longbook_choice_eng.jsonl",
           R"({"id": 0, "context": "c", "input": "Who?", "answer": ["Ann"], "options": ["Bob", "Ann"]})");
  EXPECT_THAT(choice[0].answers, ElementsAre("Ann", "B"));
  EXPECT_THAT(choice[0].question, HasSubstr("Who?\nA. Bob\nB. Ann"));
  const auto found =
      read("math_find.jsonl",
           R"({"id": 0, "context": "[1, 8.67]", "input": "The largest number?", "answer": [8.67]})");
  EXPECT_EQ(found[0].match, Match::decimal);
  EXPECT_THAT(found[0].answers, ElementsAre("8.67"));
  const auto debug = read(
      "code_debug.jsonl",
      R"({"id": 0, "context": "c", "input": "Which?", "answer": ["f", "C"], "options": ["g", "h", "f", "i"]})");
  EXPECT_EQ(debug[0].match, Match::debug);
  EXPECT_THAT(debug[0].answers, ElementsAre("f", "C"));
  EXPECT_THAT(debug[0].question, HasSubstr("C. f"));
  EXPECT_THAT(error_of("no_such.jsonl", R"({"id": 0, "context": "c", "input": "i", "answer": 3})"),
              HasSubstr("expected one of the tasks passkey"));
  EXPECT_THAT(error_of("longbook_choice_eng.jsonl",
                       R"({"id": 0, "context": "c", "input": "i", "answer": "x", "options": ["y"]})"),
              HasSubstr("the answer among them"));
}

TEST_F(DatasetTest, InfiniteBenchHasTwelveTasks) {
  const auto one = [&](const std::string& task, const std::string& answer) {
    return read(task + ".jsonl",
                R"({"id": 0, "context": "c", "input": "func_1(-2)?", "answer": )" + answer + "}")[0];
  };
  for (const char* values : {"[4, 12, -3]", "[[4, 12, -3]]"}) {
    const Sample calc = one("math_calc", values);
    EXPECT_EQ(calc.match, Match::values);
    EXPECT_THAT(calc.answers, ElementsAre("4", "12", "-3"));
    EXPECT_EQ(calc.max_new, 30000);
    EXPECT_THAT(calc.question, testing::Not(HasSubstr("Question:"))) << "the expression is the context";
  }
  const Sample run = one("code_run", "-7");
  EXPECT_EQ(run.match, Match::last_number);
  EXPECT_THAT(run.question, HasSubstr("func_1(-2)?"));
  EXPECT_EQ(one("longbook_sum_eng", R"(["A summary."])").match, Match::rouge_lsum);
  EXPECT_EQ(one("longbook_sum_eng", R"(["A summary."])").max_new, 1200);
  EXPECT_EQ(one("longbook_qa_chn", R"(["甲"])").match, Match::characters);
  EXPECT_EQ(one("longdialogue_qa_eng", R"(["ACE", "ACE ROTHSTEIN"])").match, Match::speaker);
  EXPECT_THAT(one("longdialogue_qa_eng", R"(["ACE"])").question, HasSubstr("$$MASK$$"));
}

TEST_F(DatasetTest, LongBenchHasItsChineseTasks) {
  const auto one = [&](const std::string& task) {
    return read("a.jsonl",
                R"({"dataset": ")" + task +
                    R"(", "context": "c", "input": "甲？", "answers": ["段落3"], "all_classes": ["x"]})")[0];
  };
  EXPECT_EQ(one("multifieldqa_zh").match, Match::characters);
  EXPECT_EQ(one("dureader").match, Match::rouge_l_characters);
  EXPECT_EQ(one("dureader").max_new, 128);
  EXPECT_EQ(one("vcsum").match, Match::rouge_l_characters);
  EXPECT_THAT(one("vcsum").question, testing::Not(HasSubstr("甲"))) << "a summary has no question";
  EXPECT_EQ(one("lsht").match, Match::classes);
  const Sample passage = one("passage_retrieval_zh");
  EXPECT_EQ(score("段落3", passage), 1.0);
  EXPECT_EQ(score("段落4", passage), 0.0);
  EXPECT_THAT(passage.question, HasSubstr("甲？"));
}

TEST_F(DatasetTest, TasksOfExamplesAndCodeStandInNoChatTemplate) {
  for (const std::string task : {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p", "trec_e"})
    EXPECT_TRUE(
        read("a.jsonl", R"({"dataset": ")" + task +
                            R"(", "context": "c", "input": "q", "answers": ["s"], "all_classes": ["s"]})")[0]
            .verbatim)
        << task;
  for (const std::string task : {"qasper", "passage_count", "gov_report"})
    EXPECT_FALSE(read("a.jsonl",
                      R"({"dataset": ")" + task + R"(", "context": "c", "input": "q", "answers": ["s"]})")[0]
                     .verbatim)
        << task;
}

TEST_F(DatasetTest, LongBenchSaysItsTaskItself) {
  const auto samples = read(
      "any.jsonl",
      R"({"_id": "a", "dataset": "trec", "context": "c", "input": "q", "answers": ["Food"], "length": 3, "language": "en", "all_classes": ["Food", "City"]})"
      "\n"
      R"({"_id": "b", "dataset": "gov_report_e", "context": "c", "input": "", "answers": ["s"], "length": 3, "language": "en", "all_classes": null})");
  EXPECT_EQ(samples[0].match, Match::classes);
  EXPECT_THAT(samples[0].classes, ElementsAre("Food", "City"));
  EXPECT_EQ(samples[0].max_new, 64);
  EXPECT_TRUE(samples[0].first_line) << "the authors score its first line alone, and stop nowhere before";
  EXPECT_FALSE(samples[1].first_line);
  EXPECT_EQ(samples[1].match, Match::rouge_l);
  EXPECT_EQ(samples[1].max_new, 512);
  EXPECT_EQ(samples[0].context, samples[1].context) << "equal texts are prefilled once";
  EXPECT_THAT(error_of("a.jsonl", R"({"dataset": "no-such", "context": "c", "input": "", "answers": ["s"]})"),
              HasSubstr("line 1: expected one of the tasks narrativeqa"));
}

TEST_F(DatasetTest, TemplatesPutTheirOwnWordsAround) {
  const fs::path prompts =
      write("dataset2prompt.json", R"({"qasper": "Read: {context}\n\nAsk: {input}\nSay:"})");
  const fs::path file =
      write("q.jsonl", R"({"dataset": "qasper", "context": "TEXT", "input": "why?", "answers": ["s"]})");
  const auto samples = read_dataset(file, DatasetFormat::longbench, 0, prompts).samples;
  EXPECT_EQ(*samples[0].context, "Read: TEXT");
  EXPECT_EQ(samples[0].question, "\n\nAsk: why?\nSay:");
  write("dataset2prompt.json", R"({"qasper": "{input} Read: {context} {input} Again: {input}"})");
  const auto before = read_dataset(file, DatasetFormat::longbench, 0, prompts).samples;
  EXPECT_EQ(*before[0].context, "why? Read: TEXT");
  EXPECT_EQ(before[0].question, " why? Again: why?");
}

TEST_F(DatasetTest, TemplatesNameAnyFieldButTheAnswers) {
  const fs::path prompts = write("p.json", R"({"longbook_choice_eng":
    "{context}\n{input} A) {OPTION_A} B) {OPTION_B} of {options}; {answer} {unknown} {id}"})");
  const fs::path file = write(
      "longbook_choice_eng.jsonl",
      R"({"id": 7, "context": "c {input}", "input": "{id}?", "answer": ["Ann"], "options": ["Bob", "Ann"]})");
  const auto samples = read_dataset(file, DatasetFormat::infinitebench, 0, prompts).samples;
  EXPECT_EQ(*samples[0].context, "c {input}") << "what is put in is not a template";
  EXPECT_EQ(samples[0].question, "\n{id}? A) Bob B) Ann of A. Bob\nB. Ann; {answer} {unknown} 7");
}

TEST_F(DatasetTest, TasksThatNeedAnInstructionHaveOne) {
  const auto question = [&](const std::string& task, const std::string& input) {
    return read("a.jsonl", R"({"dataset": ")" + task + R"(", "context": "c", "input": ")" + input +
                               R"(", "answers": ["s"], "all_classes": ["s"]})")[0]
        .question;
  };
  EXPECT_THAT(question("passage_count", ""), HasSubstr("How many different paragraphs"));
  EXPECT_THAT(question("passage_count_e", ""), HasSubstr("How many different paragraphs"));
  EXPECT_THAT(question("passage_retrieval_en", "An abstract."),
              HasSubstr("An abstract.\n\nOf which paragraph?"));
  EXPECT_EQ(question("trec", "Question: q\\nType:"), "\nQuestion: q\nType:")
      << "not a question about a question";
  EXPECT_EQ(question("lcc", ""), "");
  EXPECT_EQ(question("hotpotqa", "q?"), "\n\nQuestion: q?\nAnswer:");
}

TEST_F(DatasetTest, AnEmptyAnswerIsASampleThatNothingAnswers) {
  const auto samples =
      read("a.jsonl", R"({"dataset": "qasper", "context": "c", "input": "q", "answers": [""]})"
                      "\n"
                      R"({"dataset": "qasper", "context": "c", "input": "q", "answers": ["x", ""]})");
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_THAT(samples[0].answers, ElementsAre(""));
  EXPECT_THAT(samples[1].answers, ElementsAre("x"));
  for (const Match match :
       {Match::f1, Match::contains, Match::any, Match::exact, Match::code, Match::rouge_l}) {
    Sample sample = samples[0];
    sample.match = match;
    EXPECT_EQ(score("", sample), 0.0);
    EXPECT_EQ(score("x", sample), 0.0);
  }
}

TEST_F(DatasetTest, HaystacksLieBesideTheirFile) {
  for (const char* path : {"/etc/passwd", "../a.txt", "hay/../../a.txt", ".."}) {
    EXPECT_THAT(error_of("needle.json",
                         std::string(R"({"needle": "n.", "question": "q", "answer": "a", "lengths": [9],
      "depths": [1], "haystack": ")") +
                             path + "\"}"),
                HasSubstr("beside the file"))
        << path;
  }
}

TEST_F(DatasetTest, HaystacksAreUtf8AndCutBetweenCharacters) {
  const std::string json = R"({"needle": "n.", "haystack": "hay.txt", "question": "q", "answer": "a",
    "lengths": [7, 8, 9], "depths": [100]})";
  write("hay.txt", "ab \u00e9\u00e9\u00e9.");
  const auto samples = read("needle.json", json);
  ASSERT_EQ(samples.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(invalid_utf8(*samples[i].context), std::string::npos);
  EXPECT_THAT(*samples[0].context, HasSubstr("ab \u00e9"));
  write("hay.txt",
        "One two. Thr\xe9"
        "e four.");
  EXPECT_THAT(error_of("needle.json", json),
              HasSubstr("hay.txt: expected UTF-8, found an invalid byte at offset 12"));
}

TEST_F(DatasetTest, PreFixQaAsksManyQuestionsOfOneText) {
  const auto samples = read("prefix_qa_dataset.json", R"([
    {"context": "paper", "context_id": 0, "question": "a?", "answer": "x y", "question_id": 0, "context_length": 5},
    {"context": "paper", "context_id": 0, "question": "b?", "answer": "z", "question_id": 1, "context_length": 5}])");
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].context, samples[1].context);
  EXPECT_EQ(samples[1].match, Match::f1);
  EXPECT_NE(samples[0].id, samples[1].id);
}

TEST_F(DatasetTest, NeedlesStandBehindFullStopsAtTheirDepths) {
  write("hay/a.txt", "One two three. Four five six. Seven eight nine. ");
  const auto samples = read("needle.json", R"({"needle": "The key is 7.", "haystack": "hay",
    "question": "What is the key?", "answer": "7", "lengths": [100, 200], "depths": [0, 50, 100]})");
  ASSERT_EQ(samples.size(), 6u);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Sample& s = samples[i];
    EXPECT_LE(s.context->size(), i < 3 ? 101u : 201u);
    EXPECT_EQ(s.tokens, 0) << "nobody counted";
    const std::size_t at = s.context->find(" The key is 7.");
    ASSERT_NE(at, std::string::npos);
    EXPECT_TRUE(at == 0 || (*s.context)[at - 1] == '.');
  }
  EXPECT_EQ(samples[0].depth, 0.0);
  const auto words = [](std::string_view text) { return std::count(text.begin(), text.end(), ' '); };
  const auto counted = read_dataset(folder_ / "needle.json", DatasetFormat::automatic, 0, {}, words).samples;
  EXPECT_EQ(counted[0].tokens, counted[2].tokens) << "one length, whatever the depth";
  EXPECT_NEAR(counted[3].tokens, words(*counted[3].context + counted[3].question), 2);
  EXPECT_GT(counted[3].tokens, counted[0].tokens);
}

TEST_F(DatasetTest, BadSamplesAreNamedAndTheOthersAreRead) {
  const std::string bad =
      R"({"_id": "a", "dataset": "qasper", "context")"
      "\n"
      R"({"_id": "b", "dataset": "no-such", "context": "c", "input": "", "answers": ["s"]})"
      "\n";
  const std::string good =
      R"({"_id": "c", "dataset": "qasper", "context": "c", "input": "q", "answers": ["x"]})";
  const Dataset set = read_dataset(write("l.jsonl", bad + good), DatasetFormat::automatic, 0);
  ASSERT_EQ(set.samples.size(), 1u);
  ASSERT_EQ(set.unread.size(), 2u);
  EXPECT_THAT(set.unread[0].where, testing::EndsWith("l.jsonl line 1"));
  EXPECT_EQ(set.unread[0].id, "") << "what cannot be parsed tells none";
  EXPECT_EQ(set.unread[1].id, "b");
  EXPECT_THAT(set.unread[1].reason, testing::StartsWith("expected one of the tasks narrativeqa"));
  EXPECT_THAT(remark_of(set.unread[1]), HasSubstr("l.jsonl line 2, sample 'b': expected one of the tasks"));
  EXPECT_THAT(error_of("l.jsonl", bad, DatasetFormat::longbench),
              testing::AllOf(HasSubstr("line 1: "), HasSubstr("no good sample, 1 more are bad")));
  const Dataset list =
      read_dataset(write("p.json", R"([{"context": "c", "question": "q", "answer": "a", "question_id": 4},
                          {"context": "c", "question": 3, "answer": "a", "question_id": 5}])"),
                   DatasetFormat::automatic, 0);
  EXPECT_EQ(list.samples.size(), 1u);
  ASSERT_EQ(list.unread.size(), 1u);
  EXPECT_EQ(list.unread[0].id, "5");
  EXPECT_THAT(list.unread[0].where, testing::EndsWith("p.json item 2"));
}

TEST_F(DatasetTest, FaultsAreOneSentence) {
  EXPECT_THAT(
      error_of("a.jsonl", R"({"context": "c", "question": "q", "answers": ["a"]})"),
      HasSubstr("line 1: expected a sample's fields id, task, tokens, context, question, answers and match, "
                "found none called id, task, tokens, match"));
  write("nothing.txt", "");
  EXPECT_THAT(error_of("a.json", R"({"needle": "n", "haystack": "nothing.txt", "question": "q", "answer": "a",
    "lengths": [100], "depths": [0]})"),
              HasSubstr("nothing.txt: expected a text, found an empty file"));
  const fs::path file = write("b.jsonl", R"({"context": "c", "question": "q", "answer": "a"})");
  for (const char* prompts : {"[]", R"({"prefixqa": "no place for the text"})"}) {
    try {
      read_dataset(file, DatasetFormat::automatic, 0, write("prompts.json", prompts));
      ADD_FAILURE() << prompts;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr("prompts.json: ")) << "by its name";
    }
  }
  EXPECT_THAT(error_of("a.jsonl", ""), HasSubstr("found an empty file"));
  EXPECT_THAT(error_of("a.jsonl", "{}"), HasSubstr("expected the fields of one of the formats"));
  EXPECT_THAT(error_of("a.jsonl", "[]"), HasSubstr("expected the fields"));
  EXPECT_THAT(error_of("a.jsonl", "[]", DatasetFormat::prefixqa), HasSubstr("found none"));
  EXPECT_THAT(error_of("a.jsonl", "[3]", DatasetFormat::ruler), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of("a.jsonl", R"({"input": "t", "outputs": []})"),
              HasSubstr("'outputs': expected an answer"));
  EXPECT_THAT(error_of("a.jsonl", R"({"input": "t", "outputs": [{}]})"),
              HasSubstr("a string or a whole number"));
  EXPECT_THAT(error_of("a.jsonl", R"({"input": 3, "outputs": ["x"]})"), HasSubstr("'input'"));
  EXPECT_THAT(
      error_of(
          "a.json",
          R"({"needle": "n", "haystack": "no/such", "question": "q", "answer": "a", "lengths": [9], "depths": [1]})"),
      HasSubstr("no/such"));
  EXPECT_THROW(parse_dataset_format("csv"), InputError);
}

}  // namespace
}  // namespace lode
