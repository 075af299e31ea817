// SPDX-License-Identifier: Apache-2.0
// Thoughts and answers are told apart by marks that are tokens, whatever is asked and wherever the stream is cut.
#include "text/thoughts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/next_token.h"
#include "support/tiny_tokenizer.h"

namespace lode {
namespace {

/// Of bytes, with these marks; `special` are those that texts cannot spell.
Tokenizer marked(const std::vector<std::string>& plain, const std::vector<std::string>& special = {}) {
  Json json = test::byte_level_tokenizer();
  int id = 300;
  for (const auto* const list : {&plain, &special})
    for (const std::string& text : *list)
      json["added_tokens"].push_back({{"id", id++}, {"content", text}, {"special", list == &special}});
  return Tokenizer::parse(json.dump(), "t");
}

/// What is collected of an answer, whole and piece by piece.
struct Said {
  std::string answer, thoughts, answer_pieces, thought_pieces, stop;
  std::size_t marks = 0;  ///< tokens that are no answer
  bool stopped = false, answering = false;
};

Said collect(const Tokenizer& tokenizer, const std::string& prompt, const std::string& text,
             const std::vector<std::string>& stop = {}, std::size_t most = 1 << 20) {
  const auto encode = [&](const std::string& part) {
    return tokenizer.encode(part, Tokenizer::Bos::none, Tokenizer::Special::parsed);
  };
  Said said;
  const GenerateOptions options = {
      .stop = stop,
      .on_text = [&](std::string_view piece) { said.answer_pieces += piece; },
      .on_thought = [&](std::string_view piece) { said.thought_pieces += piece; }};
  TextCollector collector(tokenizer, options, Thoughts(tokenizer, {}, encode(prompt)));
  for (const TokenId token : encode(text)) {
    if (said.stopped || most-- == 0) break;
    said.stopped = collector.push(token);
    said.marks += collector.answers() ? 0 : 1;
  }
  said.answering = collector.thoughts().answering();
  said.answer = collector.finish();
  said.stop = collector.stop();
  said.thoughts = collector.finish_thoughts();
  EXPECT_EQ(said.answer_pieces, said.answer);
  EXPECT_EQ(said.thought_pieces, said.thoughts);
  return said;
}

void expect_said(const Said& said, const std::string& thoughts, const std::string& answer) {
  EXPECT_EQ(said.thoughts, thoughts);
  EXPECT_EQ(said.answer, answer);
}

const std::vector<std::string> kTags = {"<think>", "</think>"};
const std::vector<std::string> kHarmony = {"<|start|>", "<|channel|>", "<|message|>",
                                           "<|end|>",   "<|return|>",  "<|constrain|>"};

TEST(Thoughts, StandBetweenTags) {
  const Tokenizer t = marked(kTags);
  expect_said(collect(t, "Who?<eos>", "<think>\nHm, é.\n\nYes.\n</think>\n\nAda.\n"), "Hm, é.\n\nYes.",
              "Ada.\n");
  expect_said(collect(t, "Who?<eos>", "<think>\n\n</think>\n\nAda."), "", "Ada.");
  expect_said(collect(t, "Who?<eos>", "  Ada."), "",
              "  Ada.");  // blanks are the answer's where nothing was thought
  expect_said(collect(t, "", "<think>a</think> <think>b</think> c"), "a\n\nb", "c");
  expect_said(collect(t, "", "</think>\nc"), "", "c");
  expect_said(collect(t, "", "\n <think>a</think>\nc"), "a", "c");
  expect_said(collect(t, "", "\n"), "", "\n");
  expect_said(collect(marked({"[THINK]", "[/THINK]"}), "", "[THINK]a[/THINK]b"), "a", "b");
}

TEST(Thoughts, StandInGemmasChannel) {
  const Tokenizer t = marked({}, {"<|channel>", "<channel|>", "<|turn>", "<turn|>"});
  const std::string asked = "<|turn>user\nWho?<turn|>\n<|turn>model\n";
  const Said said = collect(t, asked, "<|channel>thought\nHm, é.\n<channel|>Ada.<turn|>");
  expect_said(said, "Hm, é.", "Ada.");
  EXPECT_EQ(said.marks, 10 + t.encode("Hm, é.\n", Tokenizer::Bos::none).size()) << "the name is of the mark";
  expect_said(collect(t, asked, "<|channel>thought\n<channel|>Ada."), "", "Ada.");
  expect_said(collect(t, asked, "<|channel>thought<channel|>Ada."), "", "Ada.");
  expect_said(collect(t, asked, "<|channel>Hm.<channel|>Ada."), "Hm.", "Ada.");
  expect_said(collect(t, asked, "<|channel>tho"), "", "");
  expect_said(collect(t, asked, "Ada."), "", "Ada.");
  expect_said(collect(t, asked, "A <channel|> b"), "", "A  b");
  // What the template ends with when the model is not to think, and when thoughts are begun for it.
  expect_said(collect(t, asked + "<|channel>thought\n<channel|>", "Ada."), "", "Ada.");
  expect_said(collect(t, asked + "<|channel>thought\n", "Hm.<channel|>Ada."), "Hm.", "Ada.");
  expect_said(collect(t, asked + "<|channel>", "thought\nHm.<channel|>Ada."), "Hm.", "Ada.");
  expect_said(collect(t, "What is <|channel>?<turn|>", "Ada."), "", "Ada.");
  // Names in pieces that are cut anywhere: each token of bytes is one.
  const std::string text = "<|channel>thought\nHm.\n<channel|>Ada.";
  const std::size_t tokens = t.encode(text, Tokenizer::Bos::none, Tokenizer::Special::parsed).size();
  for (std::size_t most = 0; most <= tokens; ++most) {
    const Said cut = collect(t, asked, text, {}, most);
    EXPECT_TRUE(std::string("Hm.").starts_with(cut.thoughts)) << most;
    EXPECT_TRUE(std::string("Ada.").starts_with(cut.answer)) << most;
  }
}

TEST(Thoughts, AWordOfTheAnswerIsNoMark) {
  expect_said(collect(marked(kTags), "", "<think>a</think>Write <think>x</think>."), "a",
              "Write <think>x</think>.");
  expect_said(collect(marked(kTags), "", "Write <think>."), "", "Write <think>.");
}

TEST(Thoughts, ThePromptMayHaveOpenedThem) {
  const Tokenizer t = marked(kTags);
  for (const char* prompt : {"Who?<eos><think>\n", "<think>a</think>b<eos>Who?<eos><think>"})
    expect_said(collect(t, prompt, "Hm.</think>Ada."), "Hm.", "Ada.");
  for (const char* prompt : {"Who?<eos><think>\n\n</think>\n\n", "What is <think>?<eos>",
                             "What is <think>?\nAnswer:", "<think>a</think>", ""})
    expect_said(collect(t, prompt, "Ada."), "", "Ada.");
  const std::vector<TokenId> before = {300}, prompt = {'\n'};
  EXPECT_FALSE(Thoughts(t, before, prompt).answering());
}

TEST(Thoughts, WhereTheyMayBegin) {
  const Tokenizer t = marked(kTags);
  const std::vector<TokenId> empty = {300, 301};
  EXPECT_EQ(Thoughts(t, {}, {}).opening(), 300);
  EXPECT_EQ(Thoughts(t, {}, empty).opening(), -1);
  EXPECT_EQ(Thoughts(marked({"<think>"}), {}, {}).opening(), -1);  // one mark is none
  EXPECT_EQ(Thoughts(marked({}, kHarmony), {}, {}).opening(), -1);
  Thoughts thoughts(t, {}, {});
  EXPECT_EQ(thoughts.push('\n'), Thoughts::Part::answer);
  EXPECT_EQ(thoughts.opening(), 300);
  EXPECT_EQ(thoughts.push('A'), Thoughts::Part::answer);
  EXPECT_EQ(thoughts.opening(), -1);
}

TEST(Thoughts, CanBeEnded) {
  const auto closing = [](const Tokenizer& t, const std::string& prompt) {
    const auto ids = t.encode(prompt, Tokenizer::Bos::none, Tokenizer::Special::parsed);
    std::string text;
    for (const TokenId token : Thoughts(t, {}, ids).closing()) text += t.bytes_of(token);
    return text;
  };
  EXPECT_EQ(closing(marked(kTags), "<think>\n"), "</think>");
  for (const char* prompt : {"", "<think></think>"}) EXPECT_EQ(closing(marked(kTags), prompt), "");
  const Tokenizer gemma = marked({}, {"<|channel>", "<channel|>"});
  EXPECT_EQ(closing(gemma, "<|channel>thought\n"), "<channel|>");
  EXPECT_EQ(closing(gemma, "<|channel>tho"), "") << "its name comes first";
  const Tokenizer harmony = marked({}, kHarmony);
  const std::string begun = "<|start|>assistant<|channel|>analysis";
  EXPECT_EQ(closing(harmony, begun + "<|message|>Hm."),
            "<|end|><|start|>assistant<|channel|>final<|message|>");
  EXPECT_EQ(closing(harmony, begun), "") << "within a header";
  EXPECT_EQ(closing(harmony, "<|start|>assistant<|channel|>final<|message|>"), "");
}

TEST(Thoughts, AreTheChannelsOfHarmony) {
  const Tokenizer t = marked({}, kHarmony);
  const std::string asked = "<|start|>user<|message|>Who?<|end|><|start|>assistant";
  const Said said = collect(
      t, asked,
      "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ada.<|return|>");
  expect_said(said, "Hm.", "Ada.");
  expect_said(collect(t, asked,
                      "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
                      "to=functions.f<|constrain|>json<|message|>{}<|end|><|start|>assistant<|channel|>final "
                      "<|constrain|>json<|message|>{\"a\":1}"),
              "Hm.\n\n{}", "{\"a\":1}");
  expect_said(collect(t, asked, "<|message|>Ada."), "", "Ada.");
  expect_said(collect(t, asked + "<|channel|>final<|message|>", " Ada."), "", " Ada.");
  expect_said(collect(t, asked + "<|channel|>analysis<|message|>", "Hm."), "Hm.", "");
  expect_said(collect(t, "Who?", "Ada."), "", "Ada.");  // outside of a template
  expect_said(collect(t, asked, "<|channel|>anal"), "", "");
  // Tags are no marks of a model that has channels, nor are channels that lack one.
  expect_said(collect(marked(kTags, kHarmony), "", "<think>a</think>b"), "", "<think>a</think>b");
  expect_said(
      collect(marked({}, {"<|start|>", "<|channel|>", "<|message|>"}), "", "<|channel|>final<|message|>b"),
      "", "finalb");
}

TEST(Thoughts, StopTextsAreTheAnswersAlone) {
  const Tokenizer t = marked(kTags);
  const Said said = collect(t, "", "<think>a.\nb</think>\nc.\nd", {"\n"});
  expect_said(said, "a.\nb", "c.");
  EXPECT_TRUE(said.stopped);
  EXPECT_EQ(said.stop, "\n");
  // Blanks between thoughts and the answer are neither's.
  EXPECT_EQ(collect(t, "", "<think>a</think>\n\nc.", {"\n\n"}).stop, "");
  EXPECT_EQ(collect(t, "", "one two", {"two", "one"}).stop, "one");  // the first in the text
}

TEST(Thoughts, ACutStreamKeepsWhatWasSaid) {
  const Tokenizer t = marked(kTags);
  const std::string text = "<think>\nHm, é.\n</think>\n\nAda é.";
  const std::string thoughts = "Hm, é.", answer = "Ada é.";
  const std::size_t tokens = t.encode(text, Tokenizer::Bos::none, Tokenizer::Special::parsed).size();
  for (std::size_t most = 0; most <= tokens; ++most) {
    const Said said = collect(t, "", text, {}, most);
    EXPECT_TRUE(thoughts.starts_with(said.thoughts) || said.thoughts.ends_with("\xEF\xBF\xBD")) << most;
    EXPECT_TRUE(answer.starts_with(said.answer) || said.answer.ends_with("\xEF\xBF\xBD")) << most;
    EXPECT_TRUE(said.answer.empty() || said.thoughts == thoughts);
    EXPECT_TRUE(said.answering || said.marks == most);
  }
  EXPECT_EQ(collect(t, "", text).marks, 2 + t.encode("\nHm, é.\n", Tokenizer::Bos::none).size());
}

TEST(Thoughts, NoMarksNoThoughts) {
  const Tokenizer t = marked({});
  const std::string text = "\n<think>a</think>\n b<|channel|>c";
  const Said said = collect(t, "<think>", text);
  expect_said(said, "", text);
  EXPECT_EQ(said.marks, 0u);
}

}  // namespace
}  // namespace lode
