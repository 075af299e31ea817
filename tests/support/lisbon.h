// SPDX-License-Identifier: Apache-2.0
// A text with one fact in it, and the question for it, for tests with the shipped model: what an answer must
// hold is known without another run.
#pragma once

#include <string>

namespace lode::test {

/// Filler sentences [begin, end), the fact behind the 60th.
inline std::string lisbon_text(int begin, int end) {
  std::string text;
  for (int i = begin; i < end; ++i) {
    text += "The carter went down to the mill in the grey of the morning and spoke of the weather. ";
    if (i == 60) text += "The entry code of the Lisbon archive is 48213. ";
  }
  return text;
}

inline constexpr const char* kLisbonQuestion =
    "\n\nNow answer the questions about the text above.\n\nQuestion: What is the entry code of the Lisbon "
    "archive?\nAnswer:";
inline constexpr const char* kLisbonAnswer = " 48213";

}  // namespace lode::test
