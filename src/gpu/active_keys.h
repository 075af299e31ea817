// SPDX-License-Identifier: Apache-2.0
// PredictActiveTokens of RetrievalAttention's algorithm 1, beyond sink and window: which far keys of a
// layer's KV head searches find token after token, so that they are kept on the GPU. The paper leaves the
// rule open. Ours counts finds: every kTokensPerUpdate tokens counts are halved, keys found often take free
// slots or those of keys found less than half as often, and keys that are found no more leave. Which keys are
// active depends on the sparse tokens before alone, not on threads, nor on chunks where steps end at
// multiples of kTokensPerUpdate (a method's longer blocks may cross them).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/selection.h"

namespace lode {

class ThreadPool;

class ActiveKeys {
 public:
  static constexpr std::int64_t kTokensPerUpdate = 16;
  static constexpr int kMovesPerUpdate = 64;  ///< of a layer's KV head, at most
  static constexpr std::int64_t kMostSlots = 32000;

  /// A key that goes to a slot.
  struct Move {
    int layer = 0, kv_head = 0;
    std::int32_t slot = 0;
    Position row = 0;
  };

  /// Room for `slots` keys (1 to kMostSlots) of each layer's KV head.
  ActiveKeys(int layers, int kv_heads, std::int64_t slots);

  std::int64_t slots() const { return slots_; }
  /// The active keys by slot, [0, how many).
  std::span<const Position> rows(int layer, int kv_head) const { return of(layer, kv_head).rows; }

  /// Counts what a layer's search found and leaves in `rest` what of it is not active. Returns how many rows
  /// were left out, those of a set once for each of its tokens. A head whose sets carry an estimate of what
  /// they skipped has no active keys: they would count twice.
  std::int64_t take(int layer, const Selection& found, Selection& rest, ThreadPool& pool);
  /// Changes what is active; the moves are to be done before it is attended, in any order.
  std::vector<Move> update(ThreadPool& pool);
  /// Forgets everything.
  void clear();

 private:
  /// A key that was found, in a table with open addresses.
  struct Entry {
    Position row = -1;
    std::uint16_t finds = 0;
    std::int16_t slot = -1;
  };
  struct Head {
    std::vector<Entry> table;  // [a power of 2]; empty before the first find
    std::int64_t used = 0;
    std::vector<Position> rows;
    bool estimates = false;
  };

  const Head& of(int layer, int kv_head) const {
    return heads_[static_cast<std::size_t>(layer * kv_heads_ + kv_head)];
  }
  Entry& place_of(Head& head, Position row) const;
  bool note(Head& head, Position row, std::int64_t finds) const;
  std::int64_t take_set(Head& head, const Selection::Set& set, Selection& rest) const;
  void promote(Head& head, std::vector<Move>& moves) const;
  void leave(Head& head, std::vector<Move>& moves) const;
  void fade(Head& head) const;

  int kv_heads_;
  std::int64_t slots_;
  std::size_t table_size_;
  bool any_found_ = false;
  std::vector<Head> heads_;  // [layers, Hkv]
};

}  // namespace lode
