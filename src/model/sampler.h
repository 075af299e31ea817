// SPDX-License-Identifier: Apache-2.0
// From logits to the next token.
#pragma once

#include <span>
#include <vector>

#include "base/rng.h"
#include "lodestone/engine.h"

namespace lode {

/// Tokens that may be drawn with their probabilities, which add up to 1; by rising id.
struct TokenProbability {
  TokenId token = 0;
  double probability = 0;
};
using TokenProbabilities = std::vector<TokenProbability>;

class Sampler {
 public:
  /// InputError on temperature < 0, top_k < 0, top_p outside (0, 1], min_p outside [0, 1], NaN.
  explicit Sampler(const Sampling& options);
  /// Temperature 0: the largest logit, lowest id on ties. Otherwise top-k, then top-p, then min-p are cut
  /// from the softmax at that temperature, and one of the rest is drawn.
  TokenId next(std::span<const float> logits /*[V]*/);

  /// What next() draws from. Temperature 0: one token.
  TokenProbabilities probabilities(std::span<const float> logits /*[V]*/);
  TokenId draw(const TokenProbabilities& from);
  /// Speculative sampling (Leviathan et al. 2023, algorithm 1): `token` was drawn from `drafted`; what comes
  /// back is distributed as `wanted`, and is `token` as often as that allows.
  TokenId correct(TokenId token, const TokenProbabilities& drafted, const TokenProbabilities& wanted);

 private:
  /// Fills candidates_, cuts it, and returns the sum of what is left.
  double cut(std::span<const float> logits);
  Sampling options_;
  Rng rng_;
  /// The ith likeliest of candidates_; sorts as many as are asked for.
  const std::pair<float, TokenId>& candidate(std::size_t i);
  std::vector<std::pair<float, TokenId>> candidates_;  // share (the likeliest token's is 1), id
  std::size_t sorted_ = 0;                             // the first so many, falling, are the likeliest
};

}  // namespace lode
