// SPDX-License-Identifier: Apache-2.0
// UTF-8 one character at a time, and what to show for bytes that are none.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lode {

enum class Utf8Kind {
  valid,    ///< a whole character
  invalid,  ///< bytes that no character begins with
  cut,      ///< a legal beginning of a character, and the text ends there
};

struct Utf8Step {
  std::size_t bytes;  ///< of the character, or of the longest beginning of one that is broken off
  Utf8Kind kind;
};

/// What stands at the front of `text`, which is not empty.
Utf8Step utf8_step(std::string_view text);

/// The character at the front of valid UTF-8, and its bytes.
struct CodePoint {
  char32_t value;
  std::size_t bytes;
};
CodePoint first_code_point(std::string_view text);
/// The last one of valid UTF-8 that is not empty.
CodePoint last_code_point(std::string_view text);

void append_utf8(std::string& text, char32_t code_point);

/// Every broken sequence (the longest beginning of a character, or one byte) becomes one U+FFFD.
std::string replace_invalid_utf8(std::string_view bytes);

/// U+FFFD.
inline constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace lode
