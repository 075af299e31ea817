// SPDX-License-Identifier: Apache-2.0
// For methods that attend whole lists of keys: rows that lie list by list are read as runs, which memory
// delivers up to twice as fast as single rows (docs/decisions/kv-store.md).
#pragma once

#include <cstdint>

#include "kv/move_rows.h"
#include "lodestone/selector.h"

namespace lode {

class OrdersRows {
 public:
  virtual ~OrdersRows() = default;
  /// The order in which the lists of a head would be runs, over keys below `end` alone, which every query to
  /// come has among its far keys; no tokens: nothing to gain. A function of the index.
  virtual RowOrder row_order(std::int32_t sequence, int head, Position end) const = 0;
  /// From now on the rows of all heads lie as row_order() said for `end`, and selections name rows; 0: they
  /// are in token order. Keys below `end` must not be forgotten (roll_back, build) before that is said.
  virtual void rows_ordered(std::int32_t sequence, Position end) = 0;
  /// What rows_ordered() has said.
  virtual Position ordered_end(std::int32_t sequence) const = 0;
};

/// Keys behind the sink and before this are far for every query behind a context of so many tokens.
Position always_far_end(const LocalWindow& dense, std::int64_t tokens);

/// Moves the rows of a layer, which are in token order, into the order of its selector's lists; `selector`
/// may be null. Nothing happens where the selector has none, or where there is nothing to gain.
void order_rows(KvStore& kv, int layer, Selector* selector, std::int32_t sequence, Position end,
                ThreadPool& pool);
/// Moves them back, if they are in that order.
void restore_rows(KvStore& kv, int layer, Selector* selector, std::int32_t sequence, ThreadPool& pool);
/// One past the last row of a layer that may hold another token than its own; 0 = all are in token order.
Position ordered_end(const Selector* selector, std::int32_t sequence);

}  // namespace lode
