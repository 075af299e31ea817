// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/far_recall.h"

#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

/// One query head and token of a set.
struct Asked {
  std::int64_t set = 0;
  const QueryBlock* block = nullptr;
  std::int64_t token = 0;
  int head = 0;  // query head
};

bool holds(const Selection::Set& set, Position row) {
  return std::any_of(set.runs.begin(), set.runs.end(),
                     [&](const Run& run) { return row >= run.begin && row < run.end; }) ||
         std::binary_search(set.rows.begin(), set.rows.end(), row);
}

/// The best far keys, rising.
std::vector<Position> best_far(const Asked& asked, const LayerGeometry& geometry, std::int64_t top) {
  const QueryBlock& block = *asked.block;
  const std::int64_t begin = block.far_begin, end = block.far_end(asked.token, geometry.dense);
  std::vector<float> scores(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
  const std::int64_t row = asked.token * geometry.query_heads + asked.head;
  kernels().score_run(block.q.data() + row * geometry.head_dim, 1,
                      block.kv.heads[static_cast<std::size_t>(asked.head / geometry.group())], begin, end,
                      scores.data(), end - begin);
  std::vector<Position> best;
  top_k(scores, top, block.far_begin, best);
  return best;
}

}  // namespace

void FarRecall::look(Selector& selector, const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                     std::int64_t top) {
  Selection selection;
  selector.take_work();
  selector.select(blocks, selection);
  scored += selector.take_work().keys_scored;
  std::vector<Asked> asked;
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const QuerySet& queries = selection.set(i).queries;
    const QueryBlock& block = *std::find_if(
        blocks.begin(), blocks.end(), [&](const QueryBlock& b) { return b.sequence == queries.sequence; });
    for (std::int64_t t = queries.token_begin; t < queries.token_end; ++t)
      for (int g = 0; g < geometry.group(); ++g)
        if ((queries.heads >> g & 1u) != 0)
          asked.push_back({i, &block, t, queries.kv_head * geometry.group() + g});
  }
  std::vector<std::int64_t> of_wanted(asked.size()), of_found(asked.size());
  geometry.pool->for_each(std::ssize(asked), [&](std::int64_t item, int) {
    const auto at = static_cast<std::size_t>(item);
    const std::vector<Position> best = best_far(asked[at], geometry, top);
    const Selection::Set set = selection.set(asked[at].set);
    of_wanted[at] = std::ssize(best);
    of_found[at] = std::count_if(best.begin(), best.end(), [&](Position row) { return holds(set, row); });
  });
  for (std::size_t i = 0; i < asked.size(); ++i) {
    wanted += of_wanted[i];
    found += of_found[i];
    far_keys += std::max<std::int64_t>(
        0, std::int64_t{asked[i].block->far_end(asked[i].token, geometry.dense)} - asked[i].block->far_begin);
  }
}

}  // namespace lode
