// SPDX-License-Identifier: Apache-2.0
// Tokens that a sparse method proposes and full attention has yet to verify: self-speculative decoding.
#pragma once

#include <algorithm>
#include <cmath>
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

/// So many that all of them are accepted in two of five cases: for a draft that costs a tenth to a third of a dense
/// step this is within a few percent of the best length at every accepted share.
inline std::int64_t DraftLength::next() const {
  constexpr double kAllAccepted = 0.4;
  const double share = accepted_ / checked_;
  if (share >= 1) return kMost;
  const double length = std::log(kAllAccepted) / std::log(std::max(share, 0.01));
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(length), 1, kMost);
}

inline void DraftLength::learn(std::int64_t accepted, std::int64_t drafted) {
  constexpr double kKept = 0.8;  // of what earlier steps say
  // Behind the first token that was refused nothing has been checked.
  const std::int64_t checked = std::min(accepted + 1, drafted);
  accepted_ = kKept * accepted_ + static_cast<double>(accepted);
  checked_ = kKept * checked_ + static_cast<double>(checked);
}

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
