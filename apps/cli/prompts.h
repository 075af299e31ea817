// SPDX-License-Identifier: Apache-2.0
// How a document and the questions about it reach a model: inside a conversation, by the model's chat template, or
// one behind the other, by --template.
#pragma once

#include <CLI/CLI.hpp>
#include <ctime>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat/indexed_text.h"
#include "lodestone/document.h"
#include "lodestone/engine.h"
#include "text/chat_template.h"

namespace lode::cli {

/// A flag's text with \n, \t and \\ as what they stand for.
std::string unescaped(std::string_view text);

/// Of `index`, where a document's place in the conversation is decided.
struct ChatFlags {
  std::string chat = "auto", system, document_role = "user", think;
};
void add_chat_flags(CLI::App& verb, ChatFlags& flags);

/// What is indexed of a text. `before`: the attachments of the file at `before_path`, which holds some of it: the day
/// that its template was told of stays. Else it is told of `now`.
IndexedText indexed_text(const Model& model, const ChatFlags& flags, const std::string& text,
                         const Attachments& before, const std::string& before_path, std::time_t now);

/// Of `ask` and `chat`.
struct PromptFlags {
  std::string chat = "auto", think;           ///< think: thinking_of
  std::optional<std::int64_t> most_thoughts;  ///< tokens; none: as many as the model likes
  std::string question_template;              ///< as typed
  std::vector<std::string> stop = {"\\n"};
  bool template_given = false, stop_given = false;
};
void add_prompt_flags(CLI::App& verb, PromptFlags& flags);
/// Looks which of them were given.
void note_prompt_flags(const CLI::App& verb, PromptFlags& flags);

/// Puts questions about one document.
class Prompts {
 public:
  /// `text`: the document's. InputError when the flags do not fit what the file holds.
  Prompts(const PromptFlags& flags, const Model& model, const Attachments& attachments, std::string text,
          const std::string& where);

  bool chat() const { return chat_ != nullptr; }
  /// What follows the document: question, answer, question, ..., up to where the answer to the last one begins.
  std::vector<TokenId> of(std::span<const std::string> turns) const;
  /// Where an answer ends, and its thoughts.
  void set_ends(GenerateOptions& options) const;
  /// Why nothing is left of an answer of at most so many tokens; empty when something is.
  std::string why_empty(const Generation& answer, std::int64_t most_tokens) const;
  const std::string& remark() const { return remark_; }  ///< may be empty

 private:
  const Model& model_;
  std::string text_, template_, remark_;
  Thinking thinking_;
  std::optional<std::int64_t> most_thoughts_;
  PartEncoder encoder_;
  std::unique_ptr<DocumentChat> chat_;
  std::vector<std::string> stop_;
};

}  // namespace lode::cli
