// SPDX-License-Identifier: Apache-2.0
// What is indexed of a text: its tokens, in the model's chat template where the model has one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lodestone/document.h"
#include "lodestone/engine.h"
#include "text/chat_template.h"

namespace lode {

struct IndexedText {
  std::vector<TokenId> tokens;
  std::int64_t first_token = 0;      ///< how many stand in front of the text
  Attachments attachments;           ///< the chat template, if one is used
  std::vector<std::string> remarks;  ///< what the user should know
};

/// The chat template as it applies to a document. `where` names it in messages.
DocumentChat document_chat(const Model& model, DocumentChat::Settings settings, const std::string& where);

/// A text without a template: BOS as the tokenizer and its config say.
IndexedText plain_text(const Model& model, const std::string& text);
/// A text in the first message of a conversation.
IndexedText text_in_chat(const Model& model, const DocumentChat& chat, const std::string& text);

}  // namespace lode
