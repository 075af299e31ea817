// SPDX-License-Identifier: Apache-2.0
// Prefill attention over threads: one task is a tile of query rows of one KV head over a stretch of keys.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/attend_span.h"
#include "kernels/kernels.h"
#include "lodestone/attention.h"
#include "lodestone/error.h"

namespace lode {
namespace {

// With fewer (head, tile) pairs than this, keys are split too, so that a short question over a long context
// still uses every thread. The split follows from the shapes alone, never from the number of threads.
constexpr std::int64_t kEnoughTasks = 64;
constexpr std::int64_t kLeastSplit = 2048;

struct Shape {
  std::int64_t tokens, keys, group, kv_heads, tile_tokens, tiles, split_keys, splits;
  int d;
};

Shape shape_of(std::int64_t tokens, int query_heads, std::span<const KvRows> kv, int causal_rows) {
  Shape s{};
  s.tokens = tokens, s.keys = kv[0].rows, s.d = kv[0].d;
  s.kv_heads = static_cast<std::int64_t>(kv.size());
  s.group = query_heads / s.kv_heads;
  s.tile_tokens = std::max<std::int64_t>(1, causal_rows / s.group);
  s.tiles = (tokens + s.tile_tokens - 1) / s.tile_tokens;
  const std::int64_t wanted = std::max<std::int64_t>(1, kEnoughTasks / (s.tiles * s.kv_heads));
  s.split_keys = std::max(kLeastSplit, (s.keys / wanted + kLeastSplit - 1) / kLeastSplit * kLeastSplit);
  s.splits = (s.keys + s.split_keys - 1) / s.split_keys;
  if (s.tiles * s.kv_heads >= kEnoughTasks) s.splits = 1, s.split_keys = s.keys;
  return s;
}

/// Per-thread buffers: the tile's scaled queries, its state and the kernel's scratch.
struct Workspace {
  std::vector<float> q, state, scratch;
};

}  // namespace

void attend_prefill(std::span<const float> q, std::int64_t tokens, int query_heads,
                    std::span<const KvRows> kv, float scale, float* o, float* lse, ThreadPool& pool) {
  if (tokens == 0) return;
  LODE_ASSERT(kv[0].rows >= tokens);
  attend_span(q, tokens, query_heads, kv, kv[0].rows - tokens, scale, o, lse, pool);
}

void attend_span(std::span<const float> q, std::int64_t tokens, int query_heads, std::span<const KvRows> kv,
                 std::int64_t first, float scale, float* o, float* lse, ThreadPool& pool) {
  if (tokens == 0) return;
  const KernelTable& table = kernels();
  const Shape s = shape_of(tokens, query_heads, kv, table.causal_rows);
  LODE_ASSERT(s.d <= kMaxHeadDim && first >= 0 && s.group * s.kv_heads == query_heads);
  const std::int64_t d = s.d, tile_rows = s.tile_tokens * s.group;
  std::vector<Workspace> workspaces(static_cast<std::size_t>(pool.size()));
  const std::int64_t heads = query_heads;
  // Unmerged parts, only when keys are split: [splits, T, Hq, d] and [splits, T, Hq].
  const bool split = s.splits > 1;
  std::vector<float> parts(split ? static_cast<std::size_t>(s.splits * tokens * heads * d) : 0);
  std::vector<float> part_lse(split || !lse ? static_cast<std::size_t>(s.splits * tokens * heads) : 0);

  // Later tiles see more keys: they go first, so that the longest tasks do not end the loop alone.
  pool.for_each(s.tiles * s.kv_heads * s.splits, [&](std::int64_t task, int worker) {
    check_cancel();
    const std::int64_t part = task % s.splits, head = task / s.splits % s.kv_heads;
    const std::int64_t tile = s.tiles - 1 - task / s.splits / s.kv_heads;
    const std::int64_t t0 = tile * s.tile_tokens;
    const auto count = static_cast<int>(std::min(s.tile_tokens, tokens - t0));
    Workspace& w = workspaces[static_cast<std::size_t>(worker)];
    w.q.resize(static_cast<std::size_t>(tile_rows * d));
    w.state.resize(static_cast<std::size_t>(tile_rows * (d + 2)));
    w.scratch.resize(static_cast<std::size_t>(table.causal_scratch(s.d, tile_rows)));
    const std::int64_t rows = count * s.group;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* from = q.data() + ((t0 + r / s.group) * heads + head * s.group + r % s.group) * d;
      for (std::int64_t c = 0; c < d; ++c) w.q[static_cast<std::size_t>(r * d + c)] = from[c] * scale;
    }
    const SoftmaxState state{w.state.data(), w.state.data() + tile_rows * d,
                             w.state.data() + tile_rows * (d + 1)};
    std::fill(w.state.begin(), w.state.end(), 0.0f);
    std::fill_n(state.m, tile_rows, -std::numeric_limits<float>::infinity());
    table.attend_causal(w.q.data(), s.group * d, count, static_cast<int>(s.group),
                        static_cast<Position>(first + t0), kv[static_cast<std::size_t>(head)],
                        part * s.split_keys, std::min(s.keys, (part + 1) * s.split_keys), state,
                        w.scratch.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t at = (t0 + r / s.group) * heads + head * s.group + r % s.group;
      const std::int64_t to = part * tokens * heads + at;
      float* out = split ? parts.data() + to * d : o + at * d;
      const float l = state.l[r], inverse = l == 0.0f ? 0.0f : 1.0f / l;
      for (std::int64_t c = 0; c < d; ++c) out[c] = state.o[r * d + c] * inverse;
      const float value = l == 0.0f ? -std::numeric_limits<float>::infinity() : state.m[r] + std::log(l);
      if (split) part_lse[static_cast<std::size_t>(to)] = value;
      if (!split && lse) lse[at] = value;
    }
  });
  if (!split) return;
  std::vector<float> total(lse ? 0 : static_cast<std::size_t>(tokens * heads));
  float* sums = lse ? lse : total.data();
  pool.for_each(tokens, [&](std::int64_t t, int) {
    const AttentionState sum{o + t * heads * d, sums + t * heads, heads, d};
    sum.clear();
    for (std::int64_t part = 0; part < s.splits; ++part) {
      const std::int64_t at = (part * tokens + t) * heads;
      merge(sum, {parts.data() + at * d, part_lse.data() + at, heads, d});
    }
  });
}

}  // namespace lode
