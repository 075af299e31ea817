// SPDX-License-Identifier: Apache-2.0
// Passages that are cited carry the answer: without them it is another one, without others it is the same.
#include "lodestone/sources.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/rng.h"
#include "engine/blanking.h"
#include "engine/context.h"
#include "engine/sentences.h"
#include "lodestone/error.h"
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

TEST(Sources, BlankingWhatIsCitedChangesTheAnswerAndBlankingOthersDoesNot) {
  const auto model = Model::load(kPocket);
  const std::string text = text_of_facts();
  Context context(model, {.max_tokens = 4096});
  set_source(context, read_document(text, "facts.txt", {}), std::ssize(model->tokenizer().prefix()));
  context.prefill(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  context.build_indexes();
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
