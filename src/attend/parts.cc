// SPDX-License-Identifier: Apache-2.0
#include "attend/parts.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

std::size_t find_block(std::span<const QueryBlock> blocks, std::int32_t sequence) {
  const auto found =
      std::find_if(blocks.begin(), blocks.end(), [&](const QueryBlock& b) { return b.sequence == sequence; });
  LODE_ASSERT(found != blocks.end());
  return static_cast<std::size_t>(found - blocks.begin());
}

void check_cover(std::span<const SetGroup> groups, std::span<const QueryBlock> blocks,
                 const LayerGeometry& geometry) {
  std::vector<std::vector<std::uint32_t>> covered(blocks.size());  // per block: heads of each [T, Hkv]
  for (std::size_t b = 0; b < blocks.size(); ++b)
    covered[b].resize(static_cast<std::size_t>(blocks[b].tokens * geometry.kv_heads));
  for (const SetGroup& group : groups) {
    for (const Selection::Set& set : group.sets) {
      for (std::int64_t t = group.token_begin; t < group.token_end; ++t) {
        std::uint32_t& heads =
            covered[group.block][static_cast<std::size_t>(t * geometry.kv_heads + group.kv_head)];
        LODE_ASSERT((heads & set.queries.heads) == 0);
        heads |= set.queries.heads;
      }
    }
  }
  for (const auto& block : covered) {
    for (const std::uint32_t heads : block) LODE_ASSERT(heads == all_heads(geometry.group()));
  }
}

void normalise(SetGroup& group, const QueryBlock& block, const LocalWindow& dense) {
  const Position far_end = block.far_end(group.token_end - 1, dense);
  group.far.resize(group.sets.size());
  group.complete = true;
  for (std::size_t s = 0; s < group.sets.size(); ++s) {
    group.far[s].assign(group.sets[s], block.far_begin, far_end);
    group.complete =
        group.complete && group.far[s].is_all(block.far_begin, far_end) && group.sets[s].tail_lse.empty();
  }
}

/// Adds the parts of some heads: sink and window when asked for, and the far keys, if any.
void cut_heads(const SetGroup& group, const QueryBlock& block, const LocalWindow& dense, std::uint32_t heads,
               bool with_dense, const FarKeys* far, std::vector<Part>& parts) {
  const std::int64_t first = group.token_begin, last = group.token_end - 1;
  const auto position = [&](std::int64_t t) { return block.begin + static_cast<Position>(t); };
  const Position far_first = block.far_end(first, dense), far_last = block.far_end(last, dense);
  const Position shared_end =
      std::max(far_last, position(first) + 1);  // [far_last, shared_end): in every token's window
  const auto add_part = [&](std::int64_t begin, std::int64_t end) -> KeyList& {
    parts.push_back({.queries = {group.block, group.kv_head, heads, begin, end}, .keys = {}});
    return parts.back().keys;
  };
  KeyList& shared = add_part(first, last + 1);
  const Position sink_first =
      std::min(block.far_begin, position(first) + 1);  // the text may be shorter than the sink
  if (with_dense) shared.add({0, sink_first});
  if (far != nullptr) shared.add(*far, block.far_begin, far_first);
  if (with_dense) shared.add({far_last, shared_end});
  shared.finish();
  for (std::int64_t t = first; t <= last && first < last; ++t) {
    KeyList& own = add_part(t, t + 1);
    const Position far_end = block.far_end(t, dense);
    if (with_dense) own.add({sink_first, std::min(block.far_begin, position(t) + 1)});
    if (far != nullptr) own.add(*far, far_first, far_end);
    if (with_dense) own.add({far_end, std::min(far_last, position(t) + 1)});
    if (with_dense) own.add({shared_end, position(t) + 1});
    own.finish();
  }
}

}  // namespace

std::int64_t SetGroup::far_keys(Position far_end) const {
  std::int64_t keys = 0;
  for (const FarKeys& keys_of_set : far) keys += keys_of_set.count_below(far_end);
  return keys;
}

std::vector<SetGroup> group_sets(std::span<const Selection> selections, std::span<const QueryBlock> blocks,
                                 const LayerGeometry& geometry) {
  std::vector<SetGroup> groups;
  std::map<std::tuple<std::size_t, int, std::int64_t, std::int64_t>, std::size_t> known;
  const auto add = [&](const Selection::Set& set, std::size_t block) {
    const QuerySet& q = set.queries;
    LODE_ASSERT(q.token_begin >= 0 && q.token_end <= blocks[block].tokens && q.kv_head >= 0 &&
                q.kv_head < geometry.kv_heads);
    const auto [at, fresh] = known.try_emplace({block, q.kv_head, q.token_begin, q.token_end}, groups.size());
    if (fresh) groups.push_back({block, q.kv_head, q.token_begin, q.token_end, {}, {}, false});
    groups[at->second].sets.push_back(set);
  };
  for (std::size_t s = 0; s < selections.size(); ++s) {
    for (std::int64_t i = 0; i < selections[s].sets(); ++i) {
      const Selection::Set set = selections[s].set(i);
      add(set, selections.size() == blocks.size() ? s : find_block(blocks, set.queries.sequence));
    }
  }
  check_cover(groups, blocks, geometry);
  geometry.pool->for_each(std::ssize(groups), [&](std::int64_t item, int) {
    SetGroup& group = groups[static_cast<std::size_t>(item)];
    normalise(group, blocks[group.block], geometry.dense);
  });
  return groups;
}

std::vector<SetGroup> whole_groups(std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
                                   const std::vector<bool>& skip) {
  std::vector<SetGroup> groups;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (std::int64_t t = 0; t < blocks[b].tokens && !skip[b]; ++t) {
      const Run far = {blocks[b].far_begin, blocks[b].far_end(t, geometry.dense)};
      for (int head = 0; head < geometry.kv_heads; ++head) {
        SetGroup group = {b, head, t, t + 1, {}, {}, true};
        group.sets.emplace_back().queries = {.sequence = blocks[b].sequence,
                                             .kv_head = head,
                                             .heads = all_heads(geometry.group()),
                                             .token_begin = static_cast<std::int32_t>(t),
                                             .token_end = static_cast<std::int32_t>(t + 1)};
        group.far.emplace_back();
        if (far.begin < far.end) group.far.back().runs.push_back(far);
        groups.push_back(std::move(group));
      }
    }
  }
  return groups;
}

std::vector<Part> cut(const SetGroup& group, const QueryBlock& block, const LocalWindow& dense,
                      bool far_only) {
  std::vector<Part> parts;
  std::uint32_t heads = 0;
  for (const Selection::Set& set : group.sets) heads |= set.queries.heads;
  if (group.sets.size() == 1 || group.complete) {
    cut_heads(group, block, dense, heads, /*with_dense=*/!far_only, &group.far[0], parts);
  } else {
    if (!far_only) cut_heads(group, block, dense, heads, /*with_dense=*/true, nullptr, parts);
    for (std::size_t s = 0; s < group.sets.size(); ++s) {
      cut_heads(group, block, dense, group.sets[s].queries.heads, /*with_dense=*/false, &group.far[s], parts);
    }
  }
  std::erase_if(parts, [](const Part& part) { return part.keys.empty(); });
  return parts;
}

}  // namespace lode
