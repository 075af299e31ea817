// SPDX-License-Identifier: Apache-2.0
// Cuts a template into text and the words of its tags, white space treated as Jinja does with trim_blocks and
// lstrip_blocks: the line break behind a block's tag goes, and so does the blank space before a tag that begins a line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lode::jinja {

struct Token {
  enum class Kind {
    text,
    block_begin,
    block_end,
    output_begin,
    output_end,
    name,
    string,
    integer,
    real,
    op,
    end
  };
  Kind kind;
  std::string text;  ///< of a string what it stands for
  int line;
};

/// InputError "line N: ..." on what is no template. The last token is `end`.
std::vector<Token> tokenize(std::string_view source);

/// What Python takes for white space; `text` is not empty. Its bytes, or 0.
std::size_t leading_space(std::string_view text);
std::string_view without_leading_space(std::string_view text);
std::string_view without_trailing_space(std::string_view text);

}  // namespace lode::jinja
