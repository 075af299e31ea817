// SPDX-License-Identifier: Apache-2.0
// Which of a text's tokens a GPU has, of several that each have a range of them (context parallelism). Ranges are cut
// between blocks of keys, rise with the ranks, and the last goes on without end: what is asked and answered is there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/device/layout.h"

namespace lode {

struct TextRange {
  static constexpr std::int64_t kNoEnd = std::numeric_limits<std::int64_t>::max();
  std::int64_t begin = 0, end = kNoEnd;

  bool has(std::int64_t token) const { return token >= begin && token < end; }
  /// Of the first `tokens` of the text.
  std::int64_t count(std::int64_t tokens) const { return std::clamp(tokens, begin, end) - begin; }
};

/// Range `rank` of `size` of a text of so many tokens.
inline TextRange text_range(std::int64_t tokens, int rank, int size) {
  const std::int64_t blocks = tokens / cuda::kBlockTokens;
  const auto begin = [&](int of) { return blocks * of / size * cuda::kBlockTokens; };
  return {begin(rank), rank + 1 == size ? TextRange::kNoEnd : begin(rank + 1)};
}

}  // namespace lode
