// SPDX-License-Identifier: Apache-2.0
#include "gpu/tail_pool.h"

#include <algorithm>

#include "gpu/layers/states_of.h"

namespace lode {

TailPool::TailPool(const cuda::KvLayout& layout, int layers, std::int64_t tokens,
                   std::vector<cuda::LayerRows> rows)
    : range_(layout, layers, std::max<std::int64_t>(tokens, cuda::kBlockTokens), std::move(rows)),
      blocks_(std::max<std::int64_t>(tokens / cuda::kBlockTokens, 1)) {}

std::optional<std::int64_t> TailPool::take(std::int64_t blocks) {
  std::int64_t at = 0;
  for (const auto& [first, count] : taken_) {
    if (first - at >= blocks) break;
    at = first + count;
  }
  if (at + blocks > blocks_) return std::nullopt;
  range_.back((at + blocks) * cuda::kBlockTokens);
  taken_[at] = blocks;
  return at;
}

std::int64_t reachable_behind(const GpuTail& tail, std::int64_t tokens) {
  return dynamic_cast<const CudaTail&>(tail).states.reachable(tokens);
}

void TailPool::give(std::int64_t first) {
  taken_.erase(first);
}

}  // namespace lode
