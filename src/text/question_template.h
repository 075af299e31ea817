// SPDX-License-Identifier: Apache-2.0
// How a question is put to a model without a chat template.
#pragma once

#include <string>

namespace lode {

/// What the shipped model was trained on.
inline constexpr const char* kQuestionTemplate =
    "\n\nNow answer the questions about the text above.\n\nQuestion: {question}\nAnswer:";

/// Puts the question into a template's {question}. InputError, which calls the template `where`, when it has none.
std::string fill_template(std::string text, const std::string& question, const char* where);

}  // namespace lode
