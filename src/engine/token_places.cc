// SPDX-License-Identifier: Apache-2.0
// Which bytes of its text each token of a context stands for.
#include <algorithm>

#include "engine/context.h"
#include "lodestone/sources.h"

namespace lode {

namespace {

constexpr std::size_t kSearch =
    256;                            // bytes beyond which a token that is not where it should be is not sought
constexpr std::size_t kAnchor = 4;  // tokens that must follow each other where one is found again

/// The bytes of tokens [begin, end) without those that are not text.
std::string bytes_of(const Tokenizer& tokenizer, std::span<const TokenId> ids) {
  std::string bytes;
  for (const TokenId id : ids)
    if (!tokenizer.is_special(id)) bytes += tokenizer.bytes_of(id);
  return bytes;
}

}  // namespace

/// A tokenizer that changes its text (a normaliser, a blank in front) makes tokens that are not its bytes:
/// they begin where the one before ends, until a few tokens in a row stand in the text again.
std::vector<std::size_t> token_offsets(const Context& context) {
  const Context::Impl& c = context.impl();
  const Tokenizer& tokenizer = c.model->tokenizer();
  const std::string_view text = c.source->text;
  const auto ids = std::span(c.ids).first(static_cast<std::size_t>(c.indexed));
  const auto first = static_cast<std::size_t>(std::clamp<std::int64_t>(c.first_token, 0, std::ssize(ids)));
  std::vector<std::size_t> offsets(ids.size() + 1, 0);
  std::size_t at = 0;
  for (std::size_t i = first; i < ids.size(); ++i) {
    offsets[i] = at;
    if (tokenizer.is_special(ids[i])) continue;
    const std::string_view bytes = tokenizer.bytes_of(ids[i]);
    if (text.substr(at).starts_with(bytes)) {
      at += bytes.size();
      continue;
    }
    const std::string anchor = bytes_of(tokenizer, ids.subspan(i, std::min(kAnchor, ids.size() - i)));
    const std::size_t found = text.substr(at, kSearch + anchor.size()).find(anchor);
    if (found == std::string_view::npos) continue;
    offsets[i] = at + found;
    at += found + bytes.size();
  }
  offsets.back() = ids.size() == first ? 0 : text.size();
  return offsets;
}

void set_source(Context& context, SourceText source, std::int64_t first_token) {
  context.impl().source = std::make_shared<const SourceText>(std::move(source));
  context.impl().first_token = first_token;
}

const SourceText& source_of(const Context& context) {
  return *context.impl().source;
}

}  // namespace lode
