// SPDX-License-Identifier: Apache-2.0
// The tokens of a text, with or without the model's chat template; lodestone/chat.h decides which.
#pragma once

#include <string>

#include "lodestone/chat.h"
#include "lodestone/engine.h"
#include "text/chat_template.h"

namespace lode {

/// The chat template as it applies to a document. `where` names it in messages.
DocumentChat document_chat(const Model& model, DocumentChat::Settings settings, const std::string& where);

/// A text without a template: BOS as the tokenizer and its config say.
IndexedText plain_text(const Model& model, const std::string& text);
/// A text in the first message of a conversation.
IndexedText text_in_chat(const Model& model, const DocumentChat& chat, const std::string& text);

}  // namespace lode
