// SPDX-License-Identifier: Apache-2.0
// The tokenizer of a GGUF file, written as the tokenizer.json that says the same.
#pragma once

#include <string>
#include <vector>

#include "io/gguf.h"
#include "lodestone/types.h"

namespace lode {

/// InputError names a kind of tokenizer, or a way to cut texts (tokenizer.ggml.pre), that is not known: tokens
/// would differ from those that the model was trained with.
std::string tokenizer_json(const GgufMetadata& metadata);

/// The tokens that end an answer: those that the file names, and control tokens that are known to end a turn.
std::vector<TokenId> end_tokens(const GgufMetadata& metadata);

}  // namespace lode
