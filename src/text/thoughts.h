// SPDX-License-Identifier: Apache-2.0
// Some models think before they answer. Their marks are tokens: "<think>" and "</think>" (Qwen3, DeepSeek, GLM),
// "[THINK]" and "[/THINK]" (Mistral), "<|channel>thought" and a line break, "<channel|>" (Gemma 4), or harmony's channels
// (gpt-oss): "<|channel|>analysis<|message|>...<|end|>", of which "final" is the answer. This tells thoughts from the
// answer, token by token.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/tokenizer.h"

namespace lode {

/// What may stand around thoughts and belongs to nothing.
inline constexpr std::string_view kThoughtBlanks = " \t\r\n";

class Thoughts {
 public:
  /// What a token belongs to. A mark is shown nowhere: so are the roles and names of channels.
  enum class Part { answer, thought, mark };

  /// `before` the prompt and in it, as far as it matters, stands whether a thought is open already: templates may end
  /// with "<think>\n" or "<|start|>assistant". The tokenizer must outlive this.
  Thoughts(const Tokenizer& tokenizer, std::span<const TokenId> before, std::span<const TokenId> prompt);

  /// The next token of what the model says.
  Part push(TokenId token);
  /// Whether the next token would belong to the answer, if it is no mark.
  bool answering() const { return state_ == State::answer; }
  /// The mark that may begin thoughts now, in place of the answer; -1: none may.
  TokenId opening() const { return answering() && !said_ && !thought_ ? open_ : TokenId{-1}; }
  /// Tokens that end the thoughts that are open and begin the answer; none where no thoughts are.
  std::vector<TokenId> closing() const;

 private:
  enum class State { answer, thought, header, between };
  bool harmony() const { return start_ >= 0; }
  void find_marks();
  void read_prompt(TokenId token);
  void open();
  void close();
  bool still_names(TokenId token);
  Part push_harmony(TokenId token);
  bool is_blank(TokenId token) const;

  const Tokenizer* tokenizer_;
  TokenId open_ = -1, close_ = -1;  ///< -1: the model has none
  std::string_view named_;          ///< what follows `open_` and is part of the mark
  TokenId start_ = -1, channel_ = -1, message_ = -1, end_ = -1;  ///< of harmony: all or none
  State state_ = State::answer;
  bool said_ = false;     ///< the answer has begun: a mark is a word of it from here on
  bool thought_ = false;  ///< thoughts were closed
  bool naming_ = false;   ///< what follows is the channel's name
  std::string name_;
};

}  // namespace lode
