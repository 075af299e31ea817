// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <vector>

#include "attend/attend.h"
#include "attend/given_heads.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "lodestone/attend.h"
#include "lodestone/error.h"

namespace lode {

int query_heads_of(std::size_t numbers, std::span<const KvRows> kv, std::int64_t tokens) {
  if (kv.empty()) throw InputError("attend: expected at least one KV head, found none");
  const int d = kv.front().d;
  if (d < 1 || d > kMaxHeadDim)
    throw InputError(fmt::format("attend: expected a head dimension from 1 to {}, found {}", kMaxHeadDim, d));
  for (const KvRows& head : kv)
    if (head.d != d || head.rows != kv.front().rows || head.type != kv.front().type)
      throw InputError("attend: expected KV heads of one dimension, length and type");
  const auto one = static_cast<std::size_t>(tokens * d);
  const std::size_t heads = tokens > 0 ? numbers / one : 0;
  if (heads == 0 || heads * one != numbers || heads % kv.size() != 0)
    throw InputError(fmt::format(
        "attend: expected queries of a multiple of {} heads of {} numbers, found {} numbers for {} tokens",
        kv.size(), d, numbers, tokens));
  return static_cast<int>(heads);
}

namespace {

void check_choice(const KeyChoice& choice, std::int64_t rows) {
  if (!choice.log_weights.empty() && choice.log_weights.size() != choice.rows.size())
    throw InputError(fmt::format("attend: expected a log-weight for each of {} rows, found {}",
                                 choice.rows.size(), choice.log_weights.size()));
  Position next = 0;
  for (const Position row : choice.rows) {
    if (row < next || row >= rows)
      throw InputError(fmt::format("attend: expected rising rows below {}, found {} after {}", rows, row,
                                   next > 0 ? next - 1 : -1));
    next = row + 1;
  }
  next = 0;
  for (const Run& run : choice.runs) {
    if (run.begin < next || run.end < run.begin || run.end > rows)
      throw InputError(fmt::format("attend: expected rising runs of rows below {}, found {} to {}", rows,
                                   run.begin, run.end));
    next = run.end;
  }
}

}  // namespace

std::shared_ptr<ThreadPool> make_threads(int threads) {
  return std::make_shared<ThreadPool>(threads);
}

std::shared_ptr<const Rope> make_rope(std::span<const float> frequencies, int head_dim,
                                      float attention_scaling) {
  if (frequencies.empty()) return std::make_shared<Rope>(Rope::none(head_dim));
  if (2 * std::ssize(frequencies) != head_dim)
    throw InputError(fmt::format("RoPE: expected {} frequencies for heads of {}, found {}", head_dim / 2,
                                 head_dim, frequencies.size()));
  return std::make_shared<Rope>(Rope::of(frequencies, attention_scaling));
}

void unrotate(const Rope& rope, std::span<float> x, Position position) {
  rope.unrotate(x, position);
}

void attend(std::span<const float> q, std::span<const KvRows> kv, std::span<const KeyChoice> choices,
            float scale, AttentionState state, ThreadPool& threads) {
  const int query_heads = query_heads_of(q.size(), kv, 1);
  const auto heads = std::ssize(choices);
  if (heads != std::ssize(kv) && heads != query_heads)
    throw InputError(
        fmt::format("attend: expected a choice for each of {} KV heads or {} query heads, found {}",
                    kv.size(), query_heads, heads));
  if (state.rows != query_heads || state.d != kv.front().d)
    throw InputError(fmt::format("attend: expected an output of [{}, {}], found [{}, {}]", query_heads,
                                 kv.front().d, state.rows, state.d));
  const std::int64_t queries = query_heads / heads, d = kv.front().d;
  std::vector<AttendItem> items;
  for (std::int64_t h = 0; h < heads; ++h) {
    const KeyChoice& choice = choices[static_cast<std::size_t>(h)];
    const KvRows& rows = kv[static_cast<std::size_t>(h * std::ssize(kv) / heads)];
    check_choice(choice, rows.rows);
    items.push_back({.q = q.data() + h * queries * d,
                     .queries = static_cast<int>(queries),
                     .kv = rows,
                     .runs = choice.runs,
                     .rows = choice.rows,
                     .log_weights = choice.log_weights,
                     .o = state.output + h * queries * d,
                     .lse = state.lse + h * queries});
  }
  attend_items(items, scale, threads);
}

void attend_causal(std::span<const float> q, std::int64_t tokens, std::span<const KvRows> kv, float scale,
                   AttentionState state, ThreadPool& threads) {
  const int query_heads = query_heads_of(q.size(), kv, tokens);
  if (state.rows != tokens * query_heads || state.d != kv.front().d)
    throw InputError(fmt::format("attend: expected an output of [{}, {}], found [{}, {}]",
                                 tokens * query_heads, kv.front().d, state.rows, state.d));
  if (tokens > kv.front().rows)
    throw InputError(fmt::format("attend: expected keys of the {} query tokens too, found {} rows", tokens,
                                 kv.front().rows));
  attend_prefill(q, tokens, query_heads, kv, scale, state.output, state.lse, threads);
}

void attend(Selector& selector, std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
            std::span<float* const> outputs, std::span<float* const> lse) {
  if (geometry.pool == nullptr)
    throw InputError("attend: expected threads in the geometry (make_threads), found none");
  for (const QueryBlock& block : blocks)
    selector.append(block.sequence, block.kv, block.far_end(block.tokens - 1, geometry.dense));
  Selection selection;
  selector.select(blocks, selection);
  attend(blocks, selection, geometry, outputs, {}, lse);
}

}  // namespace lode
