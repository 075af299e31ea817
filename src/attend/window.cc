// SPDX-License-Identifier: Apache-2.0
// A tile is some consecutive tokens of one KV head. Keys in every token's window are attended together, those
// before them by each token alone.
#include "attend/window.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// A thread's buffers: a tile's scaled queries, its state and the kernel's scratch.
struct Workspace {
  std::vector<float> q, state, scratch;
};

struct Tile {
  std::size_t block = 0;
  std::int64_t token = 0, tokens = 0;
  int head = 0;
};

/// One head's keys at all positions: the document's rows, then the tail's.
struct Keys {
  const KvRows* document = nullptr;  // null: all rows are the tail's
  const KvRows* tail = nullptr;
  std::int64_t seam = 0;
};

Keys keys_of(const QueryBlock& block, const TailRows* tail, int head) {
  const auto h = static_cast<std::size_t>(head);
  if (tail == nullptr) return {nullptr, &block.kv.heads[h], 0};
  return {&block.kv.heads[h], &tail->kv.heads[h], tail->seam};
}

SoftmaxState rows_from(const SoftmaxState& state, std::int64_t row, std::int64_t d) {
  return {state.o + row * d, state.m + row, state.l + row};
}

/// Keys at positions [begin, end), which all of the queries see.
void attend_run(const float* q, int queries, const Keys& keys, std::int64_t begin, std::int64_t end,
                const SoftmaxState& state) {
  const KernelTable& table = kernels();
  const std::int64_t in_document = std::min(end, keys.seam);
  if (begin < in_document) table.attend_run(q, queries, *keys.document, begin, in_document, state);
  begin = std::max(begin, keys.seam);
  if (begin < end) table.attend_run(q, queries, *keys.tail, begin - keys.seam, end - keys.seam, state);
}

void accumulate(const Tile& tile, std::int64_t first, std::int64_t window, const LayerGeometry& g,
                const Keys& keys, Workspace& w, const SoftmaxState& state) {
  const std::int64_t group = g.group(), d = g.head_dim, last = first + tile.tokens - 1;
  const std::int64_t shared = std::max<std::int64_t>(0, last + 1 - window);
  for (std::int64_t t = 0; t < tile.tokens; ++t) {
    const std::int64_t own = std::max<std::int64_t>(0, first + t + 1 - window), row = t * group;
    attend_run(w.q.data() + row * d, static_cast<int>(group), keys, own, std::min(shared, first + t + 1),
               rows_from(state, row, d));
  }
  if (shared < keys.seam)
    attend_run(w.q.data(), static_cast<int>(tile.tokens * group), keys, shared, keys.seam, state);
  kernels().attend_causal(w.q.data(), group * d, static_cast<int>(tile.tokens), static_cast<int>(group),
                          static_cast<Position>(first - keys.seam), *keys.tail,
                          std::max<std::int64_t>(0, shared - keys.seam), last + 1 - keys.seam, state,
                          w.scratch.data());
}

void attend_tile(const QueryBlock& block, const TailRows* tail, const LayerGeometry& g, std::int64_t window,
                 const Tile& tile, float* out, float* lse, Workspace& w) {
  const std::int64_t group = g.group(), d = g.head_dim, rows = tile.tokens * group;
  w.q.resize(static_cast<std::size_t>(rows * d));
  w.state.assign(static_cast<std::size_t>(rows * (d + 2)), 0.0f);
  w.scratch.resize(static_cast<std::size_t>(kernels().causal_scratch(g.head_dim, rows)));
  const auto query = [&](std::int64_t row) {  // in [T, Hq]
    return (tile.token + row / group) * g.query_heads + tile.head * group + row % group;
  };
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < d; ++c)
      w.q[static_cast<std::size_t>(r * d + c)] =
          block.q[static_cast<std::size_t>(query(r) * d + c)] * g.scale;
  const SoftmaxState state{w.state.data(), w.state.data() + rows * d, w.state.data() + rows * (d + 1)};
  std::fill_n(state.m, rows, -std::numeric_limits<float>::infinity());
  accumulate(tile, block.begin + tile.token, window, g, keys_of(block, tail, tile.head), w, state);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < d; ++c) out[query(r) * d + c] = state.o[r * d + c] / state.l[r];
    if (lse != nullptr) lse[query(r)] = state.m[r] + std::log(state.l[r]);
  }
}

AttendWork work_in_window(const QueryBlock& block, std::int64_t window) {
  AttendWork work;
  for (std::int64_t t = 0; t < block.tokens; ++t)
    for (const KvRows& head : block.kv.heads)
      work += work_of(std::min(window, std::int64_t{block.begin} + t + 1), 0, 0, head.token_bytes());
  return work;
}

}  // namespace

void attend_window(std::span<const QueryBlock> blocks, std::span<const TailRows> tails,
                   const LayerGeometry& g, std::int64_t window, std::span<float* const> outputs,
                   std::span<AttendWork> work, std::span<float* const> lse) {
  LODE_ASSERT(blocks.size() == outputs.size() && blocks.size() == work.size() && g.pool != nullptr &&
              window > 0);
  const std::int64_t tile_tokens = std::max<std::int64_t>(1, kernels().causal_rows / g.group());
  std::vector<Tile> tiles;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (std::int64_t t = 0; t < blocks[b].tokens; t += tile_tokens)
      for (int head = 0; head < g.kv_heads; ++head)
        tiles.push_back({b, t, std::min(tile_tokens, blocks[b].tokens - t), head});
    work[b] += work_in_window(blocks[b], window);
  }
  std::vector<Workspace> workspaces(static_cast<std::size_t>(g.pool->size()));
  g.pool->for_each(std::ssize(tiles), [&](std::int64_t item, int worker) {
    check_cancel();
    const Tile& tile = tiles[static_cast<std::size_t>(item)];
    attend_tile(blocks[tile.block], tail_of(tails, tile.block), g, window, tile, outputs[tile.block],
                lse.empty() ? nullptr : lse[tile.block], workspaces[static_cast<std::size_t>(worker)]);
  });
}

}  // namespace lode
