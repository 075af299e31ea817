// SPDX-License-Identifier: Apache-2.0
// Passages that are cited carry the answer: without them it is another one, without others it is the same.
#include "lodestone/sources.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include "base/rng.h"
#include "engine/answer_mass.h"
#include "engine/blanking.h"
#include "engine/context.h"
#include "engine/document.h"
#include "engine/sentences.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "lodestone/token_filter.h"
#include "support/source_dir.h"

namespace lode {
namespace {

const std::filesystem::path kPocket = source_dir() / "models" / "pocket";

constexpr std::array kCities = {"Lisbon", "Cairo",  "Madrid", "Vienna", "Dublin", "Prague", "Athens",
                                "Warsaw", "Berlin", "London", "Paris",  "Rome",   "Geneva", "Boston",
                                "Moscow", "Tokyo",  "Lima",   "Oslo",   "Havana", "Delhi"};

/// Filler with a fact about each city.
std::string text_of_facts() {
  Rng rng(7);
  std::string text;
  for (std::size_t i = 0; i < kCities.size(); ++i) {
    for (int n = 0; n < 4; ++n)
      text += "The carter went down to the mill in the grey of the morning and spoke of the weather. ";
    text += "The entry code of the " + std::string(kCities[i]) + " archive is ";
    for (int digit = 0; digit < 5; ++digit) text += static_cast<char>('1' + rng.below(9));
    text += ". ";
  }
  return text;
}

std::vector<TokenId> prompt(const Model& model, const std::string& question) {
  return model.tokenizer().encode(
      "\n\nNow answer the questions about the text above.\n\nQuestion: " + question + "\nAnswer:",
      Tokenizer::Bos::none);
}

Context context_of(const std::shared_ptr<const Model>& model, const std::string& text) {
  Context context(model, {.max_tokens = 4096});
  set_source(context, read_document(text, "facts.txt", {}), std::ssize(model->tokenizer().prefix()));
  context.prefill(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  context.build_indexes();
  return context;
}

TEST(Sources, BlankingWhatIsCitedChangesTheAnswerAndBlankingOthersDoesNot) {
  const auto model = Model::load(kPocket);
  const std::string text = text_of_facts();
  Context context = context_of(model, text);
  Blanking blanking(context);
  SourceFinder finder(context, prompt(*model, "What does the text say?"));
  const auto answer = [&](const std::vector<TokenId>& asked, SourceMass* mass) {
    const Generation g =
        context.generate(asked, blanking.method(), {.max_new_tokens = 8, .stop = {"\n"}}, mass);
    context.roll_back(context.indexed_tokens());
    return g.text;
  };
  Rng rng(1);
  int right = 0, changed = 0, disturbed = 0;
  for (const char* city : kCities) {
    const auto asked = prompt(*model, "What is the entry code of the " + std::string(city) + " archive?");
    const std::string fact = "The entry code of the " + std::string(city) + " archive is ";
    blanking.set({});
    SourceMass mass;
    const std::string whole = answer(asked, &mass);
    if (whole.find(text.substr(text.find(fact) + fact.size(), 5)) == std::string::npos) continue;
    ++right;
    const auto runs = runs_of(finder.find(mass, blanking.method(), 3));
    ASSERT_FALSE(runs.empty());
    blanking.set(runs);
    changed += answer(asked, nullptr) != whole;
    blanking.set(runs_beside(runs, context.indexed_tokens(), rng));
    disturbed += answer(asked, nullptr) != whole;
  }
  std::printf("right %d, changed without their sources %d, without others %d\n", right, changed, disturbed);
  EXPECT_GE(right, 15);
  EXPECT_GE(changed * 10, right * 9);
  EXPECT_LE(disturbed * 20, right);
}

/// Makes any model give one answer.
class Dictation final : public TokenFilter {
 public:
  explicit Dictation(std::vector<TokenId> answer) : answer_(std::move(answer)) {}
  const std::vector<TokenId>& answer() const { return answer_; }
  bool apply(std::span<const TokenId> said, std::span<float> logits) override {
    if (said.size() >= answer_.size()) return false;
    std::fill(logits.begin(), logits.end(), -std::numeric_limits<float>::infinity());
    logits[static_cast<std::size_t>(answer_[said.size()])] = 0;
    return true;
  }

 private:
  std::vector<TokenId> answer_;
};

TEST(Sources, AnAnswerThatGoesOnAboutOtherThingsCitesFirstWhatItSaysFirst) {
  const auto model = Model::load(kPocket);
  const std::string text = text_of_facts();
  Context context = context_of(model, text);
  const auto fact = [&](const std::string& city) {
    const std::size_t at = text.find("The entry code of the " + city);
    return text.substr(at, text.find(". ", at) + 1 - at);
  };
  std::string said = " " + fact("Prague");
  for (int i = 0; i < 4; ++i) said += " " + fact("Tokyo");
  const auto dictation = std::make_shared<Dictation>(model->tokenizer().encode(said, Tokenizer::Bos::none));
  const auto document = Document::Impl::share(std::move(context), text, {});
  const Answer answer =
      Scheduler(model)
          .submit({.document = document,
                   .prompt = prompt(*model, "What is the entry code of the Prague archive?"),
                   .attention = parse_spec("full"),
                   .options = {.max_new_tokens = 200},
                   .want_sources = true,
                   .filter = dictation})
          .result.get();
  ASSERT_EQ(answer.generation.tokens, dictation->answer());
  const auto cited = cite(document->impl().context, answer.sources, {}, 3);
  ASSERT_GE(cited.size(), 2U);
  EXPECT_EQ(cited[0].cited_text, fact("Prague"));
  EXPECT_EQ(cited[1].cited_text, fact("Tokyo"));
}

std::vector<double> attended(const std::vector<std::pair<std::string, std::size_t>>& pieces) {
  AnswerMass mass(4);
  std::string text;
  for (const auto& [piece, token] : pieces) mass.follow(text += piece);
  for (std::size_t i = 0; i < pieces.size(); ++i) mass.add(i, pieces[i].second, 3);
  return mass.finish();
}

TEST(AnswerMass, ASentenceCountsHalfOfTheOneBeforeWhateverItsLength) {
  EXPECT_EQ(
      attended({{"It is", 0}, {" 5.", 0}, {" And", 1}, {" so", 1}, {" it", 2}, {" goes.\n", 2}, {"On", 3}}),
      (std::vector<double>{1, 0.25, 0.25, 0.25}));
  EXPECT_EQ(attended({{"5", 2}}), (std::vector<double>{0, 0, 1, 0}));
  EXPECT_EQ(attended({}), (std::vector<double>(4, 0)));
}

TEST(AnswerMass, WhatThoughtsAttendedToIsForgottenWhenTheAnswerBegins) {
  AnswerMass mass(2);
  mass.follow("");
  mass.add(0, 0, 3);
  mass.restart();
  mass.follow("Ann.");
  mass.add(1, 1, 3);
  EXPECT_EQ(mass.finish(), (std::vector<double>{0, 1}));
}

TEST(AnswerMass, TheNumberOfAnItemIsNoSentence) {
  EXPECT_EQ(
      attended({{"1", 0}, {".", 0}, {" Ann", 1}, {".\n", 1}, {"2", 2}, {".", 2}, {" Bob", 3}, {".", 3}}),
      (std::vector<double>{0.5, 0.5, 0.25, 0.25}));
}

TEST(Sources, BlankingNothingIsFullAttention) {
  const auto model = Model::load(kPocket);
  Context context(model, {.max_tokens = 1024});
  context.prefill(model->tokenizer().encode(text_of_facts().substr(0, 1500), Tokenizer::Bos::as_template));
  context.build_indexes();
  const auto question = prompt(*model, "What is the entry code of the Lisbon archive?");
  const std::vector<float> exact = context.forward(question, context.attach(parse_spec("full")));
  context.roll_back(context.indexed_tokens());
  Blanking blanking(context);
  const std::vector<float> same = context.forward(question, blanking.method());
  ASSERT_EQ(same.size(), exact.size());
  for (std::size_t i = 0; i < same.size(); ++i) ASSERT_NEAR(same[i], exact[i], 0.05) << i;
}

TEST(Sources, OtherPassagesAreAsLongAndMeetNoneThatAreCited) {
  Rng rng(3);
  const std::vector<lode::Run> cited = {{10, 30}, {50, 55}, {90, 130}};
  for (int round = 0; round < 200; ++round) {
    const std::vector<lode::Run> others = runs_beside(cited, 400, rng);
    ASSERT_EQ(others.size(), cited.size());
    std::multiset<Position> lengths, wanted = {20, 5, 40};
    Position end = 4;
    for (const lode::Run& run : others) {
      lengths.insert(run.end - run.begin);
      ASSERT_GE(run.begin, end);
      end = run.end;
      for (const lode::Run& c : cited) ASSERT_TRUE(run.end <= c.begin || c.end <= run.begin);
    }
    ASSERT_LE(end, 400);
    ASSERT_EQ(lengths, wanted);
  }
  EXPECT_TRUE(runs_beside({{4, 60}}, 80, rng).empty()) << "no room";
}

std::vector<std::string> sentences(const std::string& text) {
  const SourceText source = {.text = text};
  std::vector<std::string> all;
  for (const Sentence& s : sentences_of(source)) all.push_back(text.substr(s.begin, s.end - s.begin));
  return all;
}

TEST(Sentences, EndWhereAReaderEndsThem) {
  using Strings = std::vector<std::string>;
  EXPECT_EQ(sentences("One. Two! \"Three?\" Four"), (Strings{"One.", "Two!", "\"Three?\"", "Four"}));
  EXPECT_EQ(sentences("Dr. Who met J. S. Bach (e.g. once). He paid 3.50 for it."),
            (Strings{"Dr. Who met J. S. Bach (e.g. once).", "He paid 3.50 for it."}));
  EXPECT_EQ(sentences("# Title\n\nA line that\ngoes on. And\n\n- item one\n- item two\n"),
            (Strings{"# Title", "A line that\ngoes on.", "And", "- item one", "- item two"}));
  EXPECT_EQ(sentences("name,born\nAnn,1801\nBob,1799\n"), (Strings{"name,born", "Ann,1801", "Bob,1799"}));
  EXPECT_EQ(sentences("これは文です。次の文。"), (Strings{"これは文です。", "次の文。"}));
  EXPECT_TRUE(sentences(" \n\n ").empty());
}

TEST(Places, FollowTheTextThroughItsFiles) {
  ReadOptions options;
  options.headings = ReadOptions::Headings::on;
  SourceText source = read_document("Grüße\nan alle.\n", "a.txt", options);
  EXPECT_EQ(source.text, "File: a.txt\n\nGrüße\nan alle.\n");
  const Place place = place_of(source, source.text.find("alle"));
  ASSERT_NE(place.file, nullptr);
  EXPECT_EQ(place.file->path, "a.txt");
  EXPECT_EQ(place.line, 2);
  EXPECT_EQ(place.character, 9);
  EXPECT_EQ(place_of(source, 3).file, nullptr) << "a heading of ours";
}

}  // namespace
}  // namespace lode
