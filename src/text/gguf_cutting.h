// SPDX-License-Identifier: Apache-2.0
// What readers and writers of GGUF tokenizers share: kinds of tokens, and the ways to cut texts that the files name.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace lode {

inline constexpr std::string_view kSentencePieceBlank = "\xe2\x96\x81";  // U+2581
/// Our own, where texts get a blank in front at their very beginning alone, and none if they have one ("first"): files
/// without it mean one before every stretch between special tokens.
inline constexpr std::string_view kPrependScheme = "lodestone.tokenizer.prepend_scheme";

/// Our own: ids of added tokens that take the blanks in front of them or behind them, or stand between words alone, as
/// tokenizer.json's fields of these names say. The format has no words for them.
struct TokenFlag {
  const char* field;
  std::string_view key;
};
inline constexpr std::array<TokenFlag, 3> kTokenFlags = {
    {{"lstrip", "lodestone.tokenizer.lstrip"},
     {"rstrip", "lodestone.tokenizer.rstrip"},
     {"single_word", "lodestone.tokenizer.single_word"}}};

/// tokenizer.ggml.token_type
enum class TokenKind { normal = 1, unknown, control, user_defined, unused, byte };

/// A digit, which tokenizer.json may have as a step of its own (Digits).
inline constexpr std::string_view kCutDigit = R"(\p{N})";

/// How texts are cut before BPE: the parts that match, and what lies between them.
struct Cutting {
  std::string_view name;  ///< tokenizer.ggml.pre
  /// Regular expressions, each of which cuts what the one before has left; "" for none.
  std::array<std::string_view, 6> steps;
  bool nfc = false;          ///< texts are normalised first
  bool whole_words = false;  ///< a piece that is a token needs no merges
  bool bos = false;          ///< where the file does not say

  constexpr std::size_t count() const {
    return static_cast<std::size_t>(std::ranges::find(steps, "") - steps.begin());
  }
};

/// Of names with one meaning the first is what is written.
std::span<const Cutting> cuttings();

}  // namespace lode
