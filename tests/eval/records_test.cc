// SPDX-License-Identifier: Apache-2.0
// The file of answers: goes on where a run ended, and refuses what it does not fit.
#include "lab/eval/records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/file.h"
#include "lodestone/error.h"
#include "support/refusal.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

Sample sample(const std::string& id, const std::string& question = "Q") {
  Sample s;
  s.id = id;
  s.task = "t";
  s.question = question;
  s.answers = {"a"};
  s.context = std::make_shared<std::string>("c");
  return s;
}

AnswerRecord answer(const std::string& text) {
  AnswerRecord a = {.text = text, .tokens = {1, 2, 3}, .score = 0.5, .seconds = 0.25};
  a.work.kv_bytes = 10;
  a.work.full_bytes = 40;
  a.work.far_keys = 7;
  a.work.far_total = 70;
  a.work.audited = 6;
  a.work.audit_error_sum = 1.5;
  a.work.audit_error_max = 0.5;
  a.full_layers = {0, 3};
  return a;
}

class RecordsTest : public testing::Test {
 protected:
  const test::TestFolder folder_;
  const fs::path path_ = folder_ / "records.jsonl";
  Json settings_ = {{"model", "m"}};
};

TEST_F(RecordsTest, ReadsBackWhatItWrote) {
  {
    Records records(path_, settings_);
    records.add(sample("1"), "full", answer("caf\u00e9 \xff"));  // an output may end inside a character
    records.add(sample("1"), "topk", answer("two"));
  }
  Records records(path_, settings_);
  const AnswerRecord* full = records.find(sample("1"), "full");
  ASSERT_NE(full, nullptr);
  EXPECT_EQ(full->tokens, (std::vector<TokenId>{1, 2, 3}));
  EXPECT_EQ(full->score, 0.5);
  EXPECT_EQ(full->work.density(), 0.25);
  EXPECT_EQ(full->work.selectivity(), 0.1);
  EXPECT_EQ(full->work.audited, 6);
  EXPECT_EQ(full->work.audit_error_sum, 1.5);
  EXPECT_EQ(full->full_layers, (std::vector<int>{0, 3}));
  EXPECT_EQ(records.find(sample("1"), "topk")->text, "two");
  EXPECT_EQ(records.find(sample("2"), "full"), nullptr);
  EXPECT_THROW(records.find(sample("1", "another question"), "full"), InputError);
}

TEST_F(RecordsTest, TellsApartSamplesThatDifferInAnythingThatCounts) {
  Records records(path_, settings_);
  records.add(sample("1"), "full", answer("one"));
  Sample other = sample("1");
  other.context = std::make_shared<std::string>("d");
  EXPECT_THROW(records.find(other, "full"), InputError) << "another context of the same length";
  other = sample("1");
  other.question += "?";
  EXPECT_THROW(records.find(other, "full"), InputError);
  other = sample("1");
  other.answers.push_back("another");
  EXPECT_THROW(records.find(other, "full"), InputError);
  other = sample("1");
  other.match = Match::f1;
  EXPECT_THROW(records.find(other, "full"), InputError);
  other = sample("1");
  other.max_new = 9;
  EXPECT_THROW(records.find(other, "full"), InputError);
  other = sample("1");
  other.context = std::make_shared<std::string>("c");
  EXPECT_NE(records.find(other, "full"), nullptr) << "the same text at another place";
}

TEST_F(RecordsTest, AnAnswerByAnotherArtefactIsNone) {
  {
    Records records(path_, settings_);
    records.add(sample("1"), "hash", answer("old"), "aaaa");
    EXPECT_EQ(records.find(sample("1"), "hash", "bbbb"), nullptr);
    EXPECT_EQ(records.find(sample("1"), "hash"), nullptr);
    records.add(sample("1"), "hash", answer("new"), "bbbb");
  }
  Records records(path_, settings_);
  ASSERT_NE(records.find(sample("1"), "hash", "bbbb"), nullptr);
  EXPECT_EQ(records.find(sample("1"), "hash", "bbbb")->text, "new");
  EXPECT_EQ(records.find(sample("1"), "hash", "aaaa"), nullptr);
}

TEST_F(RecordsTest, ALineCutShortIsDroppedAndWrittenAgain) {
  {
    Records records(path_, settings_);
    records.add(sample("1"), "full", answer("one"));
    records.add(sample("2"), "full", answer("two"));
  }
  fs::resize_file(path_, fs::file_size(path_) - 5);
  {
    Records records(path_, settings_);
    EXPECT_NE(records.find(sample("1"), "full"), nullptr);
    EXPECT_EQ(records.find(sample("2"), "full"), nullptr);
    records.add(sample("2"), "full", answer("two"));
  }
  EXPECT_NE(Records(path_, settings_).find(sample("2"), "full"), nullptr);
}

TEST_F(RecordsTest, RefusesOtherSettingsAndOtherFiles) {
  { Records records(path_, settings_); }
  EXPECT_THROW(Records(path_, {{"model", "other"}}), InputError);
  std::ofstream(path_) << "not json\n";
  EXPECT_THROW(Records(path_, settings_), InputError);
  std::ofstream(path_) << "no line end";
  EXPECT_THROW(Records(path_, settings_), InputError);
  std::ofstream(path_) << settings_.dump()
                       << "\n{\"id\": \"1\", \"attention\": \"a\", \"output\": \"\", \"score\": 7}\n";
  EXPECT_THROW(Records(path_, settings_), InputError);
  EXPECT_THROW(Records(fs::path(testing::TempDir()) / "no" / "folder", settings_), InputError);
}

TEST_F(RecordsTest, WithoutAPathNothingIsWritten) {
  Records records("", settings_);
  records.add(sample("1"), "full", answer("one"));
  EXPECT_EQ(records.find(sample("1"), "full")->text, "one");
}

}  // namespace
}  // namespace lode
