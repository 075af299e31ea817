// SPDX-License-Identifier: Apache-2.0
// Which query rows attend which keys together.
//
// One token with one set of keys is one part: sink, far keys and window in one list. Sets of several tokens
// share what they can: keys that are far, sink or window for all of their tokens are one part, the rest is
// one part a token. When the heads of a group chose differently, sink and window are one part for all of
// them, the far keys one part each.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "attend/keys.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"

namespace lode {

/// Some heads of one group times some consecutive tokens of one block.
struct QueryRows {
  std::size_t block = 0;
  int kv_head = 0;
  std::uint32_t heads = 0;
  std::int64_t token_begin = 0, token_end = 0;

  int count() const { return std::popcount(heads) * static_cast<int>(token_end - token_begin); }
  /// Whether they lie side by side in [T, Hq, d].
  bool contiguous() const {
    const std::uint32_t low = heads >> std::countr_zero(heads);
    return token_end - token_begin == 1 && (low & (low + 1)) == 0;
  }
  /// body(row, offset of the query in [T, Hq]) for each query, token-major.
  void for_each(const LayerGeometry& geometry, const auto& body) const {
    std::int64_t row = 0;
    for (std::int64_t t = token_begin; t < token_end; ++t) {
      for (std::uint32_t rest = heads; rest != 0; rest &= rest - 1) {
        body(row++,
             t * geometry.query_heads + std::int64_t{kv_head} * geometry.group() + std::countr_zero(rest));
      }
    }
  }
};

/// Query rows and all the keys that they attend together.
struct Part {
  QueryRows queries;
  KeyList keys;
  bool behind = false;  ///< keys are rows of the sequence's own, behind its document
};

/// The sets over the same tokens of one KV head.
struct SetGroup {
  std::size_t block = 0;
  int kv_head = 0;
  std::int64_t token_begin = 0, token_end = 0;
  std::vector<Selection::Set> sets;
  std::vector<FarKeys> far;  // [sets]
  bool complete = false;     // every set holds every far key of its tokens

  /// Far keys that one token attends, summed over the sets.
  std::int64_t far_keys(Position far_end) const;
};

/// Groups the sets of a selection, or of one a block; every (token, query head) must be in exactly one of them.
std::vector<SetGroup> group_sets(std::span<const Selection> selections, std::span<const QueryBlock> blocks,
                                 const LayerGeometry& geometry);
/// The same for blocks of which everything is selected: one group a token and KV head. Skips the blocks
/// marked.
std::vector<SetGroup> whole_groups(std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
                                   const std::vector<bool>& skip);

/// The parts of a group, in the order in which their states merge. Every query row is in one at least, unless
/// `far_only` leaves sink and window out.
std::vector<Part> cut(const SetGroup& group, const QueryBlock& block, const LocalWindow& dense,
                      bool far_only = false);

}  // namespace lode
