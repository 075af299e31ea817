// SPDX-License-Identifier: Apache-2.0
#include "serve/prompt_text.h"

#include "lodestone/error.h"

namespace lode::serve {

namespace {

constexpr std::string_view kSlot = "{question}";
constexpr const char* kBlanks = " \t\r\n";

std::string filled(std::string_view question_template, const std::string& question) {
  const std::size_t at = question_template.find(kSlot);
  LODE_ASSERT(at != std::string_view::npos);
  return std::string(question_template.substr(0, at)) + question +
         std::string(question_template.substr(at + kSlot.size()));
}

/// As `ask` takes a question.
std::string without_blanks(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
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
      prompt.text += " " + without_blanks(turn.text);
    } else if (turn.role == "system" || first) {
      prompt.text += (prompt.text.empty() && !has_document ? "" : "\n\n") + turn.text;
    } else {
      prompt.text += filled(question_template, without_blanks(turn.text));
    }
  }
  return prompt;
}

std::string BlankTrimmer::push(std::string_view text) {
  held_ += text;
  if (!begun_) held_.erase(0, std::min(held_.find_first_not_of(kBlanks), held_.size()));
  const std::size_t last = held_.find_last_not_of(kBlanks);
  if (last == std::string::npos) return {};
  begun_ = true;
  std::string ready = held_.substr(0, last + 1);
  held_.erase(0, last + 1);
  return ready;
}

}  // namespace lode::serve
