// SPDX-License-Identifier: Apache-2.0
#include "gpu/tail_pool.h"

#include <fmt/format.h>

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

TailPool::TailPool(const cuda::KvLayout& layout, int layers, std::int64_t tokens)
    : range_(layout, layers, std::max<std::int64_t>(tokens, cuda::kBlockTokens)),
      blocks_(std::max<std::int64_t>(tokens / cuda::kBlockTokens, 1)) {}

std::int64_t TailPool::take(std::int64_t blocks) {
  std::int64_t at = 0;
  for (const auto& [first, count] : taken_) {
    if (first - at >= blocks) break;
    at = first + count;
  }
  if (at + blocks > blocks_) {
    std::int64_t used = 0;
    for (const auto& [first, count] : taken_) used += count;
    throw RunError(fmt::format(
        "expected room on the GPU for {} tokens beside those of other sequences, found {} of {} in use",
        blocks * cuda::kBlockTokens, used * cuda::kBlockTokens, blocks_ * cuda::kBlockTokens));
  }
  range_.back((at + blocks) * cuda::kBlockTokens);
  taken_[at] = blocks;
  return at;
}

void TailPool::give(std::int64_t first) {
  taken_.erase(first);
}

}  // namespace lode
