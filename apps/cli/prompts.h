// SPDX-License-Identifier: Apache-2.0
// How a document and the questions about it reach a model: inside a conversation, by the model's chat template, or
// one behind the other, by --template.
#pragma once

#include <CLI/CLI.hpp>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/chat.h"
#include "lodestone/engine.h"

namespace lode::cli {

/// A flag's text with \n, \t and \\ as what they stand for.
std::string unescaped(std::string_view text);

/// Of `index`, where a document's place in the conversation is decided.
struct ChatFlags {
  std::string chat = "auto", system, document_role = "user", think;
};
void add_chat_flags(CLI::App& verb, ChatFlags& flags);
/// `now`: what a template takes for today.
ChatOptions chat_options(const ChatFlags& flags, std::time_t now);

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
PromptOptions prompt_options(const PromptFlags& flags);

/// Why nothing is left of an answer of at most so many tokens; empty when something is.
std::string why_empty(const Prompts& prompts, const Model& model, const Generation& answer,
                      std::int64_t most_tokens);

}  // namespace lode::cli
