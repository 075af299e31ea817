// SPDX-License-Identifier: Apache-2.0
// Mixed texts and what is recited of them under tokenizers of other makers: some put a space in front that
// they drop again, some end a token inside of a character, some know few words and take many tokens for a
// text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/file.h"
#include "lab/tasks/samples.h"
#include "lodestone/tokenizer.h"
#include "support/source_dir.h"

namespace lode {
namespace {

class ForeignTokenizer : public testing::TestWithParam<std::string> {
 protected:
  ForeignTokenizer() {
    const std::string path =
        source_dir().string() + "/tests/golden/tokenizers/" + GetParam() + ".tokenizer.json";
    tokenizer_ = std::make_unique<Tokenizer>(Tokenizer::parse(read_file(path), path));
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

/// Whether what is to be recited stands in the text behind words that the question quotes.
bool follows_its_opening(const Sample& s) {
  const std::string& text = *s.context;
  const std::string answer = " " + s.answers.front();
  constexpr std::size_t kQuoted = 16;
  for (std::size_t at = text.find(answer, kQuoted); at != text.npos; at = text.find(answer, at + 1))
    if (s.question.find(text.substr(at - kQuoted, kQuoted)) != text.npos) return true;
  return false;
}

TEST_P(ForeignTokenizer, TheFirstTokensOfATextAreTheStartOfThatText) {
  const TokenMeter meter = make_meter(*tokenizer_);
  for (const std::string text :
       {" went down to the harbour", " \u00e9t\u00e9 \u2014 \u4e2d\u6587", "no space in front"}) {
    for (const std::int64_t n : {1, 2, 3, 5, 8}) {
      const std::string start = meter.first(text, n);
      EXPECT_TRUE(text.starts_with(start)) << "'" << start << "'";
      EXPECT_TRUE(start.size() == text.size() ||
                  (static_cast<unsigned char>(text[start.size()]) & 0xC0u) != 0x80u)
          << "inside of a character";
    }
    // Unless its words are unknown, as most are to the smallest of these.
    EXPECT_TRUE(meter.first(text, 1000) == text || GetParam() == "metaspace");
  }
}

TEST_P(ForeignTokenizer, WhatIsRecitedOfAMixedTextFollowsItsOpeningThere) {
  const Haystack haystack = Haystack::prose(7, 400'000, make_meter(*tokenizer_));
  std::map<std::string, int> asked;
  make_samples({.task = std::string(kMixed),
                .tokens = 16384,
                .count = 1'000'000,
                .contexts = 2,
                .seed = 5,
                .questions = 8},
               Language::built_in(), haystack, [&](const Sample& s, bool) {
                 ++asked[s.task];
                 EXPECT_LE(s.length, 16384) << s.id;
                 if (s.task != "recite") return;
                 EXPECT_TRUE(follows_its_opening(s)) << s.question << s.answers.front();
                 EXPECT_GT(*s.depth, 0.0);
               });
  for (const std::string& task : mixed_tasks()) EXPECT_GE(asked[task], 2) << task;
  EXPECT_GE(asked["recite"], 8);
}

INSTANTIATE_TEST_SUITE_P(Makers, ForeignTokenizer,
                         testing::Values("deepseek", "gemma", "llama2", "llama3", "metaspace", "mistral",
                                         "nemo", "phi3", "prefix_space", "qwen", "smollm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lode
