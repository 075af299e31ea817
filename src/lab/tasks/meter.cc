// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/meter.h"

#include <algorithm>
#include <span>

#include "lodestone/tokenizer.h"

namespace lode {

namespace {

/// How much of `text` its first n tokens are. They may decode to something else: a space in front may go or
/// come, and a token may end inside of a character.
std::string_view first_tokens(const Tokenizer& tokenizer, std::string_view text, std::int64_t n) {
  const auto ids = tokenizer.encode(text, Tokenizer::Bos::none);
  const std::string decoded =
      tokenizer.decode(std::span(ids).first(std::min(ids.size(), static_cast<std::size_t>(n))));
  const std::string_view rest = text.substr(text.starts_with(' ') ? 1 : 0);
  const std::string_view same = std::string_view(decoded).substr(decoded.starts_with(' ') ? 1 : 0);
  if (decoded.empty()) return {};
  const auto differs = std::mismatch(rest.begin(), rest.end(), same.begin(), same.end()).first;
  std::size_t end = text.size() - rest.size() + static_cast<std::size_t>(differs - rest.begin());
  const auto inside_character = [&](std::size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0u) == 0x80u;
  };
  while (end > 0 && inside_character(end)) --end;
  return text.substr(0, end);
}

}  // namespace

TokenMeter make_meter(const Tokenizer& tokenizer) {
  return {.count =
              [&tokenizer](std::string_view text) {
                return static_cast<std::int64_t>(tokenizer.encode(text, Tokenizer::Bos::none).size());
              },
          .first = [&tokenizer](std::string_view text,
                                std::int64_t n) { return std::string(first_tokens(tokenizer, text, n)); },
          .prefix = static_cast<std::int64_t>(tokenizer.prefix().size())};
}

}  // namespace lode
