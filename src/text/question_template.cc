// SPDX-License-Identifier: Apache-2.0
#include "text/question_template.h"

#include "lodestone/error.h"

namespace lode {

std::string fill_template(std::string text, const std::string& question, const char* where) {
  const std::string slot = "{question}";
  const std::size_t at = text.find(slot);
  if (at == std::string::npos)
    throw InputError(std::string(where) + ": expected a text with {question} in it, found none");
  return text.replace(at, slot.size(), question);
}

}  // namespace lode
