// SPDX-License-Identifier: Apache-2.0
// From the turns of a conversation to the text that the model goes on from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "serve/backend.h"

namespace lode::serve {

struct PromptText {
  std::string text;               ///< follows the document, when there is one
  std::vector<std::string> stop;  ///< besides the request's own
};

/// For a model without a chat template: each question in the template's {question}, its answer behind it. Without a
/// document a single message is given as it is.
PromptText plain_prompt(const std::vector<Turn>& turns, std::string_view question_template,
                        bool has_document);

}  // namespace lode::serve
