// SPDX-License-Identifier: Apache-2.0
// From logits to the next token.
#pragma once

#include <span>
#include <vector>

#include "base/rng.h"
#include "lodestone/engine.h"

namespace lode {

class Sampler {
 public:
  /// InputError on temperature < 0, top_k < 0, top_p outside (0, 1], min_p outside [0, 1], NaN.
  explicit Sampler(const Sampling& options);
  /// Temperature 0: the largest logit, lowest id on ties. Otherwise top-k, then top-p, then min-p are cut
  /// from the softmax at that temperature, and one of the rest is drawn.
  TokenId next(std::span<const float> logits /*[V]*/);

 private:
  Sampling options_;
  Rng rng_;
  std::vector<std::pair<float, TokenId>> candidates_;  // probability, id; falling
};

}  // namespace lode
