// SPDX-License-Identifier: Apache-2.0
// Tokens for models of random weights: the same for the same seed.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "lodestone/types.h"

namespace lode {

inline std::vector<TokenId> some_tokens(std::int64_t count, std::uint64_t seed) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(hash_seed(seed, i) % 100);
  return tokens;
}

}  // namespace lode
