// SPDX-License-Identifier: Apache-2.0
// How a document and the questions about it reach a model: inside a conversation, by the model's chat template, or
// one behind the other, by a question template.
//
//   lode::IndexedText reading = lode::indexed_text(*model, {}, text);
//   auto document = lode::Document::read(model, reading.tokens, text, {.attachments = reading.attachments});
//   lode::Prompts prompts({}, *document, "book");
//   lode::GenerateOptions options;
//   prompts.set_ends(options);
//   scheduler.submit({.document = document, .prompt = prompts.of("Who is Nora?"), .attention = spec, .options = options});
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/document.h"
#include "lodestone/engine.h"

namespace lode {

/// Whether a chat template is used: automatic = where there is one; on = an InputError where there is none.
enum class ChatUse { automatic, on, off };
ChatUse parse_chat_use(std::string_view text);  ///< auto, on or off; InputError otherwise

/// What a caller calls these settings, for messages that say what to change. An empty `off`: it has none.
struct ChatNames {
  std::string on = "chat on", off = "chat off", system = "system", document_role = "document_in_system",
              think = "think", question_template = "question_template";
};

/// How a text is put to a model.
struct ChatOptions {
  ChatUse chat = ChatUse::automatic;
  std::string system;               ///< the system message; empty: none, or the template's own
  bool document_in_system = false;  ///< the text is part of it, not of the first question
  std::string think;                ///< on, off, low, medium or high; empty: as the template has it
  std::time_t now = 0;              ///< what the template takes for today; 0 = today
  ChatNames names = {};
};

/// What is indexed of a text.
struct IndexedText {
  std::vector<TokenId> tokens;
  std::int64_t first_token = 0;      ///< how many stand in front of the text
  Attachments attachments;           ///< the chat template, if one is used
  std::vector<std::string> remarks;  ///< what the user should know
};

/// In the model's chat template where `options` and model have it so. `before`: the attachments of the file at
/// `before_path`, which holds some of the text: the day that its template was told of stays. InputError when options and
/// model do not fit, or the template does not take the text as it is.
IndexedText indexed_text(const Model& model, const ChatOptions& options, const std::string& text,
                         const Attachments& before = {}, const std::string& before_path = {});

/// How questions are put about a text.
struct PromptOptions {
  ChatUse chat = ChatUse::automatic;               ///< go on inside the template that the text was indexed in
  std::string think;                               ///< as in ChatOptions; empty: as the text was indexed
  std::optional<std::int64_t> most_thoughts = {};  ///< tokens; none: as many as the model likes
  /// Of a text outside of a chat template; {question} is replaced, special tokens are recognised. none: the shipped
  /// model's.
  std::optional<std::string> question_template = {};
  /// Texts that end an answer. none: a line break outside of a chat template; the end of the turn ends one inside.
  std::optional<std::vector<std::string>> stop = {};
  ChatNames names = {};
};

/// Puts questions about one document.
class Prompts {
 public:
  /// `text`: the document's; `where` names it in messages. The model must outlive this. InputError when options and
  /// document do not fit.
  Prompts(const PromptOptions& options, const Model& model, const Attachments& attachments, std::string text,
          const std::string& where);
  Prompts(const PromptOptions& options, const Document& document, const std::string& where);
  ~Prompts();
  Prompts(Prompts&&) noexcept;

  bool chat() const;  ///< whether they are put in a chat template
  /// What follows the document: question, answer, question, ..., up to where the answer to the last one begins.
  std::vector<TokenId> of(std::span<const std::string> turns) const;
  std::vector<TokenId> of(const std::string& question) const;
  /// Where an answer ends, and its thoughts.
  void set_ends(GenerateOptions& options) const;
  const std::string& remark() const;  ///< what the user should know; may be empty

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
