// SPDX-License-Identifier: Apache-2.0
// Any bytes as a GGUF file: refused, or tensors within the file that do not overlap; and its metadata as a
// config and a tokenizer: refused, or ones that fit.
#include "io/gguf.h"

#include "fuzz/target.h"
#include "lodestone/tokenizer.h"
#include "text/gguf_tokenizer.h"

LODE_FUZZ_TARGET(gguf) {
  const auto bytes = std::as_bytes(std::span(input));
  const lode::GgufFile file = lode::parse_gguf(bytes, "fuzz");
  std::size_t data = 0;
  for (const auto& [name, tensor] : file.tensors) {
    LODE_ASSERT(tensor.bytes.data() >= bytes.data() &&
                tensor.bytes.data() + tensor.bytes.size() <= bytes.data() + bytes.size());
    std::int64_t n = 1;
    for (const std::int64_t dimension : tensor.shape) n *= dimension;
    LODE_ASSERT(lode::bytes_of(tensor.type, n) == std::ssize(tensor.bytes));
    data += tensor.bytes.size();
  }
  LODE_ASSERT(data <= bytes.size());
  if (!file.metadata.has("tokenizer.ggml.model")) return;
  const auto tokenizer = lode::Tokenizer::parse(lode::tokenizer_json(file.metadata), "fuzz");
  const auto tokens = tokenizer.encode("a b\xc3\xa9", lode::Tokenizer::Bos::as_template);
  for (const lode::TokenId token : tokens) LODE_ASSERT(token >= 0 && token < tokenizer.vocab());
  lode::end_tokens(file.metadata);
}
