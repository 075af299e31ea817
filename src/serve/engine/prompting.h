// SPDX-License-Identifier: Apache-2.0
// How conversations and documents reach a model: in its chat template where it has one, else as plain text.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/chat/indexed_text.h"
#include "lodestone/token_filter.h"
#include "serve/backend.h"
#include "serve/schema/constraint.h"

namespace lode::serve {

struct Prompt {
  std::vector<TokenId> tokens;
  std::vector<std::string> stop;  ///< besides the request's own
  std::string notice = {};        ///< what was asked for and could not be had; may be empty
};

/// Turns as a document's conversation goes on: question, answer, question ... What a system says stands before the next
/// question, since the document is in the first message; the first question is empty where an answer comes first.
std::vector<std::string> alternating(const std::vector<Turn>& turns);

class Prompting {
 public:
  /// `question_template`: with {question}, for a model without a chat template.
  Prompting(std::shared_ptr<const Model> model, std::string question_template);

  /// ApiError 400 when the template refuses the turns.
  Prompt of(const std::vector<Turn>& turns, const Thinking& thinking = {}) const;
  /// What follows a document.
  Prompt behind(const Document& document, const std::vector<Turn>& turns,
                const Thinking& thinking = {}) const;
  /// What is indexed of a document's text.
  IndexedText document(const std::string& text) const;
  /// Keeps one answer to a JSON schema. ApiError 400 when the schema is refused.
  std::shared_ptr<TokenFilter> filter(const std::string& schema);

 private:
  std::shared_ptr<const Model> model_;
  std::string question_template_, where_;
  PartEncoder encoder_;
  std::optional<ChatTemplate> chat_;
  std::once_flag ordered_;
  std::shared_ptr<const TokenOrder> order_;  ///< once a schema came
};

}  // namespace lode::serve
