// SPDX-License-Identifier: Apache-2.0
#include "kv/move_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Rows of an item of one thread, and how many rows ahead memory is asked for.
constexpr std::int64_t kMovedRows = 1024, kMovedAhead = 16;
constexpr std::int64_t kLine = 64;
using Part = KvStore::Part;

/// Nothing here allocates, so nothing fails: rows of which some have moved would be lost.
void move_part(std::byte* rows, std::int64_t bytes, const RowOrder& order, std::byte* moved,
               ThreadPool& pool) noexcept {
  const std::span<const Position> from = order.tokens;
  const std::int64_t count = std::ssize(from), items = (count + kMovedRows - 1) / kMovedRows;
  const auto gather = [&](std::int64_t item, int) {
    const std::int64_t first = item * kMovedRows, last = std::min(count, first + kMovedRows);
    for (std::int64_t i = first; i < last; ++i) {
      const std::byte* const ahead =
          rows + from[static_cast<std::size_t>(std::min(i + kMovedAhead, count - 1))] * bytes;
      for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead + at);
      std::memcpy(moved + i * bytes, rows + from[static_cast<std::size_t>(i)] * bytes,
                  static_cast<std::size_t>(bytes));
    }
  };
  const auto put_back = [&](std::int64_t item, int) {
    const std::int64_t first = item * kMovedRows, last = std::min(count, first + kMovedRows);
    std::memcpy(rows + (order.begin + first) * bytes, moved + first * bytes,
                static_cast<std::size_t>((last - first) * bytes));
  };
  pool.for_each(items, std::ref(gather));  // by reference: so many captures would be allocated
  pool.for_each(items, std::ref(put_back));
}

}  // namespace

RowOrder RowOrder::inverse() const {
  RowOrder back = {.begin = begin, .tokens = std::vector<Position>(tokens.size())};
  for (std::size_t i = 0; i < tokens.size(); ++i)
    back.tokens[static_cast<std::size_t>(tokens[i] - begin)] = begin + static_cast<Position>(i);
  return back;
}

void move_rows(KvStore& kv, int layer, std::span<const RowOrder> orders, ThreadPool& pool) {
  const KvShape& shape = kv.shape();
  LODE_ASSERT(std::ssize(orders) == shape.kv_heads);
  const std::int64_t row_bytes = std::int64_t{bytes_of(shape.type)} * shape.head_dim;
  std::size_t most = 0;
  for (const RowOrder& order : orders) {
    LODE_ASSERT(order.begin >= 0 && order.end() <= kv.tokens());
    most = std::max(most, order.tokens.size());
  }
  const std::size_t widest = static_cast<std::size_t>(std::max<std::int64_t>(row_bytes, sizeof(float)));
  const auto moved = std::make_unique_for_overwrite<std::byte[]>(most * widest);
  constexpr std::array<Part, 4> kParts = {Part::k, Part::v, Part::k_scale, Part::v_scale};
  for (int head = 0; head < shape.kv_heads; ++head) {
    for (const Part part : std::span(kParts).first(shape.type == DType::q8 ? 4 : 2)) {
      const bool scale = part == Part::k_scale || part == Part::v_scale;
      // The store lends its rows to be read; they lie in memory of its own that may be written.
      auto* const rows = const_cast<std::byte*>(kv.rows(layer, head, part).data());
      move_part(rows, scale ? std::int64_t{sizeof(float)} : row_bytes, orders[static_cast<std::size_t>(head)],
                moved.get(), pool);
    }
  }
}

}  // namespace lode
