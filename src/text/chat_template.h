// SPDX-License-Identifier: Apache-2.0
// A model's chat template, applied to a conversation or to a conversation about a document.
//
// What it renders comes in parts that know whether the template or a message wrote them, so that special tokens are
// found in the template's own text alone. BOS and EOS are where the template puts them, as in transformers; none is
// added.
#pragma once

#include <ctime>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/tokenizer.h"
#include "text/added_tokens.h"
#include "text/jinja/template.h"

namespace lode {

/// A turn of a conversation.
struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant"
  std::string content;
};

/// What a template says of its tokenizer's special tokens.
struct ChatTokens {
  std::string bos, eos;
  /// The texts of a config's first BOS and EOS; empty where it has none.
  static ChatTokens of(const Tokenizer& tokenizer, std::span<const TokenId> bos,
                       std::span<const TokenId> eos);
};

/// A stretch of a rendered conversation.
struct ChatPart {
  std::string text;
  int message = -1;  ///< whose content it is, counted from 0; -1: the template's own
};

/// What is asked of a model that thinks before it answers.
struct Thinking {
  std::optional<bool> on;  ///< none: as the template has it
  std::string effort;      ///< "low", "medium" or "high"; empty: as the template has it
  bool operator==(const Thinking&) const = default;
};
/// Of "on", "off" or an effort, with which the model thinks; empty: as the template has it. InputError for others,
/// which `where` begins.
Thinking thinking_of(std::string_view word, std::string_view where = "thinking");

class ChatTemplate {
 public:
  /// InputError "WHERE: line N: ..." on what is no template.
  ChatTemplate(const std::string& source, ChatTokens tokens, std::string where);

  /// `variables`: others that the template may look at, such as "tools" or "enable_thinking". InputError when the
  /// template refuses the messages.
  std::vector<ChatPart> render(std::span<const ChatMessage> messages, bool open_answer, std::time_t now,
                               const jinja::OrderedJson& variables = {}) const;
  /// What this template is told of thinking: "enable_thinking" (Qwen3, GLM), "thinking" (DeepSeek), and
  /// "reasoning_effort" (gpt-oss).
  struct Told {
    jinja::OrderedJson variables;
    std::string remark;  ///< what of it the template does not heed; empty: nothing
  };
  Told told(const Thinking& thinking) const;
  /// The special token that follows an answer, and so ends one: none where the template has plain text there, nor
  /// harmony's "<|end|>", which ends a channel: "<|return|>" and "<|call|>" end what gpt-oss answers.
  std::vector<TokenId> ends_of_turn(const Tokenizer& tokenizer) const;

 private:
  friend class DocumentChat;
  using Content = std::vector<jinja::Text>;  // by message
  jinja::Text render(std::span<const ChatMessage> messages, const Content& contents, bool as_parts,
                     bool open_answer, std::time_t now, const jinja::OrderedJson& variables) const;

  jinja::Template template_;
  ChatTokens tokens_;
  std::string where_;
};

/// Tokens of rendered parts as one text: special tokens are found in the template's own text alone, and nothing is
/// put in front.
class PartEncoder {
 public:
  /// The tokenizer must outlive this.
  explicit PartEncoder(const Tokenizer& tokenizer);
  std::vector<TokenId> encode(std::span<const ChatPart> parts) const;

 private:
  const Tokenizer& tokenizer_;
  StringFinder specials_;
};

/// A conversation that begins with a document, and then asks about it. The document's part is indexed once; what
/// follows is asked.
class DocumentChat {
 public:
  struct Settings {
    std::string source;               ///< of the template
    std::string system;               ///< the system message; empty: none, or the template's own
    bool document_in_system = false;  ///< the document is part of it, not of the first question
    std::time_t now = 0;              ///< what the template takes for today
    std::string think = {};           ///< thinking_of: what it is told where a question does not say
  };
  DocumentChat(Settings settings, ChatTokens tokens, const std::string& where);

  /// As it is stored with the document, under kAttachment.
  static constexpr const char* kAttachment = "chat";
  std::string to_json() const;
  static Settings from_json(std::string_view json, const std::string& where);

  struct Head {
    std::vector<ChatPart> parts;     ///< up to the document's last byte
    std::vector<ChatPart> in_front;  ///< those before its first
  };
  /// InputError when the template does not give the document word by word, once.
  Head head(const std::string& document) const;
  struct Tail {
    std::vector<ChatPart> parts;
    std::string remark;  ///< why `thinking` was left aside; empty: it was not
  };
  /// What follows the document: question, answer, question, ... and the beginning of the answer to the last question.
  /// `thinking` is left aside where it would change what stands up to the document's end, which was read already.
  Tail tail(const std::string& document, std::span<const std::string> turns,
            const Thinking& thinking = {}) const;

  const ChatTemplate& chat() const { return template_; }
  const Settings& settings() const { return settings_; }

 private:
  struct Cut;
  Cut render(const std::string& document, std::span<const std::string> turns,
             const jinja::OrderedJson& variables = {}) const;
  Settings settings_;
  std::string where_;
  ChatTemplate template_;
  jinja::OrderedJson usual_;  ///< what the template is told where a question does not say
};

}  // namespace lode
