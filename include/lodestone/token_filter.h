// SPDX-License-Identifier: Apache-2.0
// Says which tokens may come next in an answer: what keeps answers within a grammar.
#pragma once

#include <span>

#include "lodestone/types.h"

namespace lode {

/// Of one answer; called from one thread at a time.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  /// Puts the logits [V] of tokens that may not follow `answer` to minus infinity. False: nothing may follow, and the
  /// answer is complete. `answer` is without thoughts, which nobody filters. It is usually the one of the call before and a token more, but may be any other (a
  /// draft that was refused): the result depends on `answer` alone.
  virtual bool apply(std::span<const TokenId> answer, std::span<float> logits) = 0;
};

}  // namespace lode
