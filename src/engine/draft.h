// SPDX-License-Identifier: Apache-2.0
// Tokens that a sparse method proposes and full attention has yet to verify: self-speculative decoding.
#pragma once

#include <cstdint>
#include <vector>

#include "model/sampler.h"

namespace lode {

/// How many tokens to draft before the next dense step. It depends on the tokens of the answer alone, never on
/// time, so that an answer can be had again.
class DraftLength {
 public:
  /// A dense step has as many rows as a step generates at full speed, and the last generated token is one.
  static constexpr std::int64_t kMost = 15;

  std::int64_t next() const;
  /// `accepted` of `drafted` tokens were.
  void learn(std::int64_t accepted, std::int64_t drafted);

 private:
  // Of the last steps, older ones count less. An answer begins as if four of five had been accepted.
  double accepted_ = 4, checked_ = 5;
};

/// The draft of one sequence.
struct TokenDraft {
  std::vector<TokenId> tokens;
  std::vector<TokenProbabilities> drawn_from;  // [tokens]
  std::int64_t wanted = 0;                     ///< tokens before the next dense step

  bool complete() const { return std::ssize(tokens) >= wanted; }
  void restart(std::int64_t length) {
    tokens.clear();
    drawn_from.clear();
    wanted = length;
  }
};

}  // namespace lode
