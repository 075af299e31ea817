// SPDX-License-Identifier: Apache-2.0
#include "serve/prompt_text.h"

#include "lodestone/error.h"
#include "text/blanks.h"

namespace lode::serve {

namespace {

constexpr std::string_view kSlot = "{question}";

/// As `ask` takes a question.
std::string filled(std::string_view question_template, std::string_view question) {
  const std::size_t at = question_template.find(kSlot);
  LODE_ASSERT(at != std::string_view::npos);
  return std::string(question_template.substr(0, at)) + std::string(question) +
         std::string(question_template.substr(at + kSlot.size()));
}

}  // namespace

PromptText plain_prompt(const std::vector<Turn>& turns, std::string_view question_template,
                        bool has_document) {
  if (!has_document && turns.size() == 1) return {.text = turns.front().text, .stop = {}};
  PromptText prompt = {.text = {}, .stop = {"\n"}};
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const Turn& turn = turns[i];
    const bool first = i == 0 && !has_document;  // in place of a document
    if (turn.role == "assistant") {
      prompt.text += " " + std::string(without_blanks(turn.text));
    } else if (turn.role == "system" || first) {
      prompt.text += (prompt.text.empty() && !has_document ? "" : "\n\n") + turn.text;
    } else {
      prompt.text += filled(question_template, without_blanks(turn.text));
    }
  }
  return prompt;
}

}  // namespace lode::serve
