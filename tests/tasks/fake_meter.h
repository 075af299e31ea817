// SPDX-License-Identifier: Apache-2.0
// A token meter without a tokenizer: splits as byte-level BPE tokenizers do before merging (a space belongs
// to the word after it, every digit is alone), and takes each four letters for a token.
#pragma once

#include "lab/tasks/meter.h"

namespace lode {

inline bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c & 0x80) != 0;
}

/// Byte length of the token at the start of `text`.
inline std::size_t fake_token(std::string_view text) {
  const std::size_t space = text[0] == ' ' && text.size() > 1 ? 1 : 0;
  const auto run = [&](auto&& belongs, std::size_t most) {
    std::size_t end = space;
    while (end < text.size() && end - space < most && belongs(text[end])) ++end;
    return end;
  };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (is_letter(text[space])) return run(is_letter, 4);
  if (is_digit(text[space])) return 1;  // the space before a digit is a token of its own
  if (text[0] == '\n') return run([](char c) { return c == '\n'; }, 1000);
  return std::max<std::size_t>(
      1, run([&](char c) { return !is_letter(c) && !is_digit(c) && c != ' ' && c != '\n'; }, 1000));
}

inline TokenMeter fake_meter() {
  return {.count =
              [](std::string_view text) {
                std::int64_t tokens = 0;
                for (; !text.empty(); text.remove_prefix(fake_token(text))) ++tokens;
                return tokens;
              },
          .first =
              [](std::string_view text, std::int64_t n) {
                std::size_t end = 0;
                for (; n > 0 && end < text.size(); --n) end += fake_token(text.substr(end));
                return std::string(text.substr(0, end));
              },
          .prefix = 1};
}

}  // namespace lode
