// SPDX-License-Identifier: Apache-2.0
#include "select/shared/orders_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lode {

namespace {

/// Of all heads of a layer; none where there is nothing to gain.
std::vector<RowOrder> orders_of(const OrdersRows& lists, int heads, std::int32_t sequence, Position end) {
  std::vector<RowOrder> orders;
  for (int head = 0; head < heads; ++head) {
    orders.push_back(lists.row_order(sequence, head, end));
    if (orders.back().tokens.empty()) return {};  // of every head, or of none
  }
  return orders;
}

}  // namespace

Position always_far_end(const LocalWindow& dense, std::int64_t tokens) {
  const std::int64_t end = tokens - dense.window + (dense.from_context ? 0 : 1);
  return static_cast<Position>(std::max(dense.sink, end));
}

void order_rows(KvStore& kv, int layer, Selector* selector, std::int32_t sequence, Position end,
                ThreadPool& pool) {
  auto* const lists = dynamic_cast<OrdersRows*>(selector);
  if (lists == nullptr) return;
  const std::vector<RowOrder> orders = orders_of(*lists, kv.shape().heads(layer), sequence, end);
  if (orders.empty()) return;
  try {
    lists->rows_ordered(sequence, orders.front().end());
    move_rows(kv, layer, orders, pool);
  } catch (...) {  // no memory: nothing has moved
    lists->rows_ordered(sequence, 0);
    throw;
  }
}

void restore_rows(KvStore& kv, int layer, Selector* selector, std::int32_t sequence, ThreadPool& pool) {
  const Position end = ordered_end(selector, sequence);
  if (end == 0) return;
  auto& lists = dynamic_cast<OrdersRows&>(*selector);
  std::vector<RowOrder> orders = orders_of(lists, kv.shape().heads(layer), sequence, end);
  for (RowOrder& order : orders) order = order.inverse();
  move_rows(kv, layer, orders, pool);
  lists.rows_ordered(sequence, 0);
}

Position ordered_end(const Selector* selector, std::int32_t sequence) {
  const auto* const lists = dynamic_cast<const OrdersRows*>(selector);
  return lists == nullptr ? 0 : lists->ordered_end(sequence);
}

}  // namespace lode
