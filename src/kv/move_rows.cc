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

/// moved[i] = rows[tokens[i]].
void gather(const std::byte* rows, std::int64_t bytes, std::span<const Position> tokens, std::byte* moved,
            ThreadPool& pool) noexcept {
  const std::int64_t count = std::ssize(tokens);
  const auto piece = [&](std::int64_t item, int) {
    const std::int64_t first = item * kMovedRows, last = std::min(count, first + kMovedRows);
    for (std::int64_t i = first; i < last; ++i) {
      const std::byte* const ahead =
          rows + tokens[static_cast<std::size_t>(std::min(i + kMovedAhead, count - 1))] * bytes;
      for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead + at);
      std::memcpy(moved + i * bytes, rows + tokens[static_cast<std::size_t>(i)] * bytes,
                  static_cast<std::size_t>(bytes));
    }
  };
  pool.for_each((count + kMovedRows - 1) / kMovedRows, std::ref(piece));  // see move_rows
}

void copy(const std::byte* from, std::int64_t count, std::byte* to, ThreadPool& pool) noexcept {
  constexpr std::int64_t kPiece = std::int64_t{1} << 18;
  const auto piece = [&](std::int64_t item, int) {
    const std::int64_t first = item * kPiece, last = std::min(count, first + kPiece);
    std::memcpy(to + first, from + first, static_cast<std::size_t>(last - first));
  };
  pool.for_each((count + kPiece - 1) / kPiece, std::ref(piece));
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
  LODE_ASSERT(std::ssize(orders) == shape.heads(layer) && shape.has_rows(layer));
  const std::int64_t row_bytes = row_bytes_of(shape.type, shape.dim(layer));
  std::size_t most = 0;
  for (const RowOrder& order : orders) {
    LODE_ASSERT(order.begin >= 0 && order.end() <= kv.tokens());
    most = std::max(most, order.tokens.size());
  }
  const std::size_t widest = static_cast<std::size_t>(std::max<std::int64_t>(row_bytes, sizeof(float)));
  const auto moved = std::make_unique_for_overwrite<std::byte[]>(most * widest);
  constexpr std::array<Part, 4> kParts = {Part::k, Part::v, Part::k_scale, Part::v_scale};
  // Nothing below allocates, bodies of loops go by reference, so nothing fails: rows of which some have moved
  // would be lost.
  for (int head = 0; head < shape.heads(layer); ++head) {
    const RowOrder& order = orders[static_cast<std::size_t>(head)];
    for (const Part part : std::span(kParts).first(shape.type == DType::q8 ? 4 : 2)) {
      const bool scale = part == Part::k_scale || part == Part::v_scale;
      const std::int64_t bytes = scale ? std::int64_t{sizeof(float)} : row_bytes;
      gather(kv.rows(layer, head, part).data(), bytes, order.tokens, moved.get(), pool);
      copy(moved.get(), std::ssize(order.tokens) * bytes,
           kv.rows_to_replace(layer, head, part, order.begin, order.end()), pool);
    }
  }
}

}  // namespace lode
