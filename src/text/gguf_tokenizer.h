// SPDX-License-Identifier: Apache-2.0
// The tokenizer of a GGUF file, written as the tokenizer.json that says the same.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "lodestone/types.h"

namespace lode {

/// InputError names a kind of tokenizer, or a way to cut texts (tokenizer.ggml.pre), that is not known: tokens
/// would differ from those that the model was trained with.
std::string tokenizer_json(const GgufMetadata& metadata);

/// The list of all tokens that end an answer, in files that have more of them than keys for one each.
inline constexpr const char* kEndTokens = "tokenizer.ggml.eos_token_ids";
/// The tokens that end an answer: those that the file names, and control tokens that are known to end a turn.
std::vector<TokenId> end_tokens(const GgufMetadata& metadata);

/// The other way: a tokenizer.json as a GGUF file's metadata, the list of tokens filled up to `vocab` with
/// unused ones. InputError for what GGUF has no words for: it takes byte-level BPE whose way to cut texts is one
/// of those that the files know by name, and BPE with byte_fallback whose blanks become U+2581: by scores where
/// these say the same as the merges, else by the list of merges, as Gemma 4 has it.
/// `bos`: the model's, which chat templates may name where texts do not begin with it.
void add_tokenizer(const Json& tokenizer, std::string_view where, std::int64_t vocab, GgufWriter& to,
                   std::span<const TokenId> bos = {});

}  // namespace lode
