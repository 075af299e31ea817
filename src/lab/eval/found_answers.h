// SPDX-License-Identifier: Apache-2.0
// Answers that full attention finds in the far past, and how many of them stay under another way to attend: what a score of
// the text's questions would lose, without asking each of them.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "lab/tasks/language.h"
#include "lodestone/tokenizer.h"

namespace lode {

/// Tokens [begin, end).
struct TokenStretch {
  std::size_t begin = 0, end = 0;
};

/// The whole answers among tokens, each with the token in which the mark behind it begins, for an answer that goes on is
/// another. A token that straddles the edge of the mark in front belongs to that mark.
std::vector<TokenStretch> answers_between(const AnswerMarks& marks, const Tokenizer& tokenizer,
                                          std::span<const TokenId> tokens);

class FoundAnswers {
 public:
  /// found: [tokens] which are found in the far past; right: [tokens] which full attention predicts. An answer counts if all
  /// of it is right, and any of it found. Where it is not known what is an answer, whatever is right from one found token to
  /// the next is one.
  FoundAnswers(const std::vector<bool>& found, const std::vector<bool>& right,
               const std::optional<std::vector<TokenStretch>>& answers = std::nullopt);

  std::size_t count() const { return answers_.size(); }
  /// The share of which every token is still predicted, for one that is lost spoils an answer. right: [tokens] under another
  /// way to attend. No value when there are none.
  std::optional<double> kept(const std::vector<bool>& right) const;

 private:
  std::vector<TokenStretch> answers_;
};

}  // namespace lode
