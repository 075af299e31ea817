// SPDX-License-Identifier: Apache-2.0
// Any text through small tokenizers of the families in use. The first byte chooses one; the byte-level one
// must give every text back.
#include <array>

#include "fuzz/target.h"
#include "lodestone/tokenizer.h"
#include "support/tiny_tokenizer.h"

namespace {

using lode::Tokenizer;

Tokenizer made(const lode::Json& json) {
  return Tokenizer::parse(json.dump(), "fuzz");
}

/// Whole, in pieces, and byte by byte: all the same.
void check_round_trip(const Tokenizer& tokenizer, std::string_view text,
                      const std::vector<lode::TokenId>& tokens) {
  std::string bytes, streamed;
  lode::StreamDecoder stream(tokenizer);
  for (const lode::TokenId token : tokens) {
    bytes += tokenizer.bytes_of(token);
    streamed += stream.push(token);
  }
  LODE_ASSERT(bytes == text);
  LODE_ASSERT(streamed + stream.finish() == text);
  LODE_ASSERT(tokenizer.decode(tokens) == text);
}

}  // namespace

LODE_FUZZ_TARGET(encode) {
  static const std::array<Tokenizer, 3> tokenizers = {made(lode::test::byte_level_tokenizer()),
                                                      made(lode::test::character_tokenizer()),
                                                      made(lode::test::mixed_tokenizer())};
  if (input.empty()) return;
  const std::size_t which = static_cast<unsigned char>(input[0]) % tokenizers.size();
  const Tokenizer& tokenizer = tokenizers[which];
  const std::string_view text = input.substr(1);
  const bool valid = lode::invalid_utf8(text) == std::string_view::npos;
  const auto tokens = tokenizer.encode(text, Tokenizer::Bos::none);
  LODE_ASSERT(valid);
  const auto parsed = tokenizer.encode(text, Tokenizer::Bos::as_template, Tokenizer::Special::parsed);
  LODE_ASSERT(lode::invalid_utf8(tokenizer.decode(tokens)) == std::string::npos);
  LODE_ASSERT(lode::invalid_utf8(tokenizer.decode(parsed, false)) == std::string::npos);
  if (which == 0) check_round_trip(tokenizer, text, tokens);
}
