// SPDX-License-Identifier: Apache-2.0
// Chat templates around documents: what is indexed and what is asked make up the conversation that the template renders,
// and no content becomes a special token.
#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lodestone/error.h"
#include "support/refusal.h"
#include "support/source_dir.h"
#include "support/tiny_tokenizer.h"

namespace lode {
namespace {

constexpr const char* kChat =
    "{{ bos_token }}{% for m in messages %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}";

class Chat : public testing::Test {
 protected:
  Tokenizer tokenizer_ = Tokenizer::parse(test::byte_level_tokenizer().dump(), "t");
  const TokenId bos_ = 256, eos_ = 257;
  ChatTokens tokens_ = ChatTokens::of(tokenizer_, std::vector<TokenId>{256}, std::vector<TokenId>{257});

  std::vector<TokenId> encoded(const std::vector<ChatPart>& parts) const {
    return PartEncoder(tokenizer_).encode(parts);
  }
  static std::string text_of(const std::vector<ChatPart>& parts) {
    std::string text;
    for (const ChatPart& part : parts) text += part.text;
    return text;
  }
  DocumentChat about(const std::string& source, bool in_system = false,
                     const std::string& system = "") const {
    return {{.source = source, .system = system, .document_in_system = in_system, .now = 0}, tokens_, "t"};
  }
};

TEST_F(Chat, HeadAndTailAreTheConversation) {
  const std::vector<std::string> turns = {"Who?", "Ann.", "When?"};
  const std::string document = "  A text about <bos> and <eos>.\n";
  const DocumentChat chat = about(kChat, false, "Be brief.");
  const std::string all = text_of(chat.head(document).parts) + text_of(chat.tail(document, turns).parts);
  EXPECT_EQ(all,
            "<bos><bos>system\nBe brief.<eos>\n<bos>user\nA text about <bos> and <eos>.\n\n\nWho?<eos>\n"
            "<bos>assistant\nAnn.<eos>\n<bos>user\nWhen?<eos>\n<bos>assistant\n");
  const DocumentChat in_system = about(kChat, true, "Be brief.");
  EXPECT_EQ(text_of(in_system.head(document).parts),
            "<bos><bos>system\nBe brief.\n\n  A text about <bos> and <eos>.");
  EXPECT_EQ(text_of(in_system.tail(document, {turns.data(), 1}).parts),
            "<eos>\n<bos>user\nWho?<eos>\n<bos>assistant\n");
  const DocumentChat again(DocumentChat::from_json(chat.to_json(), "t"), tokens_, "t");
  EXPECT_EQ(text_of(again.head(document).parts), text_of(chat.head(document).parts));
}

TEST_F(Chat, ContentNeverBecomesASpecialToken) {
  const std::string document = "a<eos>b<bos><eo";
  const std::vector<std::string> turns = {"s><eos>?"};
  const DocumentChat chat = about(kChat);
  std::vector<TokenId> tokens = encoded(chat.head(document).parts);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), eos_), 0);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), bos_), 2);
  const std::vector<TokenId> tail = encoded(chat.tail(document, turns).parts);
  EXPECT_EQ(std::count(tail.begin(), tail.end(), eos_), 1);
  EXPECT_EQ(std::count(tail.begin(), tail.end(), bos_), 1);
  tokens.insert(tokens.end(), tail.begin(), tail.end());
  EXPECT_EQ(tokenizer_.decode(tokens, false),
            text_of(chat.head(document).parts) + text_of(chat.tail(document, turns).parts));
  // Parts that are harmless are one text: merges go across their seams.
  EXPECT_EQ(encoded({{"a"}, {"b", 0}, {"a", 1}, {"b"}}), std::vector<TokenId>{260});
  // A content that is nothing but a special token's text, between two that are meant.
  const std::vector<TokenId> meant = encoded({{"<eos>"}, {"<eos>", 0}, {"<eos>"}});
  EXPECT_EQ(std::count(meant.begin(), meant.end(), eos_), 2);
  EXPECT_EQ(meant.front(), eos_);
  EXPECT_EQ(meant.back(), eos_);
}

TEST_F(Chat, EndsOfTurns) {
  EXPECT_EQ(ChatTemplate(kChat, tokens_, "t").ends_of_turn(tokenizer_), std::vector<TokenId>{eos_});
  EXPECT_TRUE(ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", tokens_, "t")
                  .ends_of_turn(tokenizer_)
                  .empty());
}

/// A tokenizer with these special tokens from id 300 on.
Tokenizer with_specials(const std::vector<std::string>& texts) {
  Json json = test::byte_level_tokenizer();
  for (std::size_t i = 0; i < texts.size(); ++i)
    json["added_tokens"].push_back({{"id", 300 + i}, {"content", texts[i]}, {"special", true}});
  return Tokenizer::parse(json.dump(), "t");
}

TEST_F(Chat, AChannelsEndIsNoEndOfATurn) {
  const ChatTemplate chat("{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}", tokens_,
                          "t");
  EXPECT_EQ(chat.ends_of_turn(with_specials({"<|end|>"})), std::vector<TokenId>{300});
  EXPECT_EQ(chat.ends_of_turn(with_specials({"<|end|>", "<|return|>"})), std::vector<TokenId>{300});
  EXPECT_TRUE(chat.ends_of_turn(with_specials({"<|end|>", "<|return|>", "<|call|>"})).empty());
}

TEST_F(Chat, WhetherToThinkIsSaidBehindTheDocumentAlone) {
  const std::string rest =
      "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% "
      "endif %}";
  const std::string document = "A text.";
  const std::vector<std::string> turns = {"Who?"};
  const auto tail = [&](const std::string& source, std::optional<bool> think) {
    const DocumentChat::Tail said = about(source).tail(document, turns, {.on = think, .effort = {}});
    return text_of(said.parts) + "|" + said.remark.substr(0, 17);
  };
  EXPECT_EQ(tail(rest, {}), "\n\nWho?|");
  EXPECT_EQ(tail(rest, false), "\n\nWho?<think></think>|");
  EXPECT_EQ(tail(rest, true), "\n\nWho?|");  // as by itself
  EXPECT_EQ(tail("{% if thinking %}Think.{% endif %}" + rest, true), "\n\nWho?|the chat template");
  EXPECT_EQ(tail("{{ messages[0].content }}", false), "\n\nWho?|the chat template");
}

TEST_F(Chat, WhetherToThinkInModelsTemplates) {
  const std::string document = "A text.";
  const std::vector<std::string> turns = {"Who?"};
  const auto end_of = [&](const std::string& name, std::optional<bool> think) {
    const std::string source =
        test::bytes_of_file(source_dir() / "tests/golden/chat/templates" / (name + ".jinja"));
    const DocumentChat::Tail tail = about(source).tail(document, turns, {.on = think, .effort = {}});
    const std::string text = text_of(tail.parts);
    return (tail.remark.empty() ? "" : "(left aside)") + text.substr(text.rfind("ssistant") + 8);
  };
  EXPECT_EQ(end_of("qwen3", false), "\n<think>\n\n</think>\n\n");
  EXPECT_EQ(end_of("glm4.5", false), "|>\n<think></think>");
  EXPECT_EQ(end_of("deepseek-r1", false), "(left aside)｜><think>\n");  // it always thinks
}

TEST_F(Chat, HowMuchToThink) {
  const std::string document = "A text.";
  const std::vector<std::string> turns = {"Who?"};
  const auto tail = [&](const std::string& source, std::string_view word) {
    const DocumentChat::Tail said = about(source).tail(document, turns, thinking_of(word));
    return text_of(said.parts) + "|" + said.remark;
  };
  const std::string graded =
      "{{ messages[0].content }} {{ reasoning_effort if reasoning_effort is defined else 'medium' }}";
  EXPECT_EQ(tail(graded, ""), "\n\nWho? medium|");
  EXPECT_EQ(tail(graded, "high"), "\n\nWho? high|");
  EXPECT_EQ(tail(graded, "off"),
            "\n\nWho? low|the chat template cannot be told not to think: it was told to think little");
  EXPECT_EQ(tail(graded, "on"), "\n\nWho? medium|the chat template cannot be told whether to think");
  const std::string switched = "{{ messages[0].content }}{{ ' Hm.' if enable_thinking }}";
  EXPECT_EQ(tail(switched, "low"),
            "\n\nWho? Hm.|the chat template can be told whether to think, but not how much");
  EXPECT_EQ(tail(switched, "off"), "\n\nWho?|");
  const auto effort_alone = [&](const std::string& source) {
    return about(source).tail(document, turns, {.on = {}, .effort = "low"}).remark;
  };
  EXPECT_EQ(effort_alone(graded), "");
  EXPECT_EQ(effort_alone(switched), "the chat template can be told whether to think, but not how much");
  EXPECT_THAT(effort_alone("{{ messages[0].content }}{{ reasoning_effort if enable_thinking }}"),
              testing::HasSubstr("only where it is told to think"));
  EXPECT_EQ(tail("{{ messages[0].content }}", "low"),
            "\n\nWho?|the chat template cannot be told how much to think");
  EXPECT_EQ(tail("{% if thinking %}{{ reasoning_effort }}{% endif %}" + graded, "high").substr(0, 20),
            "\n\nWho? medium|the ch");
  EXPECT_THROW(thinking_of("much"), InputError);
  const std::string two_words =  // Mistral's
      "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}{{ "
      "raise_exception('none or high') }}{% endif %}" +
      graded;
  EXPECT_EQ(tail(two_words, "off"), "\n\nWho? none|");
  EXPECT_EQ(tail(two_words, "on"), "\n\nWho? high|");
  EXPECT_EQ(tail(two_words, "high"), "\n\nWho? high|");
  EXPECT_EQ(tail(two_words, "low"),
            "\n\nWho? high|the chat template does not know this effort: it was told 'high'");
}

/// gpt-oss says it in the system message, which stands in front of a document.
TEST_F(Chat, WhatWasSaidInFrontOfADocument) {
  const std::string source = test::bytes_of_file(source_dir() / "tests/golden/chat/templates/gpt-oss.jinja");
  const std::string document = "A text.", high = "Reasoning: high";
  const std::vector<std::string> turns = {"Who?"};
  const auto chat_of = [&](const std::string& think) {
    return DocumentChat({.source = source, .system = {}, .now = 0, .think = think}, tokens_, "t");
  };
  EXPECT_NE(text_of(about(source).head(document).parts).find("Reasoning: medium"), std::string::npos);
  EXPECT_NE(about(source).tail(document, turns, thinking_of("high")).remark, "");
  const DocumentChat chat(DocumentChat::from_json(chat_of("high").to_json(), "t"), tokens_, "t");
  EXPECT_NE(text_of(chat.head(document).parts).find(high), std::string::npos);
  EXPECT_EQ(chat.tail(document, turns, thinking_of("high")).remark, "");
  EXPECT_NE(chat.tail(document, turns, thinking_of("low")).remark, "");
  EXPECT_EQ(text_of(chat.tail(document, turns).parts), text_of(about(source).tail(document, turns).parts));
  const ChatTemplate alone(source, tokens_, "t");
  EXPECT_EQ(alone.told(thinking_of("off")).variables["reasoning_effort"], "low");
  EXPECT_EQ(about(source).to_json().find("think\""), std::string::npos)
      << "files without it stay as they were";
}

TEST_F(Chat, ContentsAsLists) {
  const std::string listed =
      "{% for m in messages %}<bos>{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% "
      "endfor %}{% endif %}<eos>"
      "{% endfor %}";
  EXPECT_EQ(text_of(about(listed).head("Text").parts), "<bos>Text");
  const std::vector<ChatMessage> messages = {{"user", "Question"}};
  EXPECT_EQ(text_of(ChatTemplate(listed, tokens_, "t").render(messages, true, 0)), "<bos>Question<eos>");
}

TEST_F(Chat, RefusesTemplatesThatChangeTheDocument) {
  for (const char* source :
       {"{% for m in messages %}{{ m.content | upper }}{% endfor %}", "{{ messages[0].role }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace(' ', '') }}{% endfor %}"})
    EXPECT_THROW(about(source).head("some text"), InputError) << source;
  const DocumentChat no_system = about(
      "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
      "{{ messages[0].content }}",
      false, "Be brief.");
  EXPECT_THROW(no_system.head("text"), InputError);
  EXPECT_THROW(DocumentChat::from_json("{}", "t"), InputError);
  try {
    DocumentChat::from_json(
        R"({"template": "", "system": "", "document_role": "user", "time": 0, "think": "much"})", "a.lode");
    ADD_FAILURE() << "expected a word that is known";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("a.lode: field 'think': expected on, off"));
  }
  EXPECT_THROW(
      DocumentChat::from_json(R"({"template": "", "system": "", "document_role": "x", "time": 0})", "t"),
      InputError);
}

}  // namespace
}  // namespace lode
