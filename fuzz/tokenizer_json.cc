// SPDX-License-Identifier: Apache-2.0
// Any text as tokenizer.json: refused, or a tokenizer that encodes and decodes without harm.
#include "fuzz/target.h"
#include "lodestone/tokenizer.h"

LODE_FUZZ_TARGET(tokenizer_json) {
  using lode::Tokenizer;
  const Tokenizer tokenizer = Tokenizer::parse(input, "fuzz");
  const auto tokens = tokenizer.encode(" ab a\u0301\u00e9 12\n\n <s>b", Tokenizer::Bos::as_template,
                                       Tokenizer::Special::parsed);
  lode::StreamDecoder stream(tokenizer);
  std::string streamed;
  for (const lode::TokenId token : tokens) streamed += stream.push(token);
  streamed += stream.finish();
  LODE_ASSERT(lode::invalid_utf8(streamed) == std::string::npos);
  LODE_ASSERT(lode::invalid_utf8(tokenizer.decode(tokens, false)) == std::string::npos);
}
