// SPDX-License-Identifier: Apache-2.0
#include "gpu/active_tier.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/threads.h"
#include "gpu/backend.h"
#include "gpu/host_tier.h"
#include "kernels/cuda/device/pages.h"
#include "kernels/cuda/device/place_rows.h"
#include "lodestone/error.h"

namespace lode {

namespace {

cuda::KvLayout layout_of(const KvShape& shape) {
  return {shape.kv_heads, shape.head_dim, shape.type, 0};
}

/// Bytes by which a row goes up: its place, key and value.
std::int64_t move_bytes(const KvShape& shape) {
  return std::int64_t{sizeof(std::int64_t)} + 2 * layout_of(shape).row_bytes();
}
std::int64_t most_moves(const KvShape& shape) {
  return std::int64_t{shape.layers} * shape.kv_heads * ActiveKeys::kMovesPerUpdate;
}
std::int64_t counts_bytes(const KvShape& shape) {
  return std::int64_t{shape.layers} * kMostSparseTokens * shape.kv_heads * std::int64_t{sizeof(std::int32_t)};
}

/// Of the lists in which so many rows are named, with the room to spare that HostLists takes.
std::int64_t lists_bytes(const KvShape& shape, std::int64_t slots) {
  return std::int64_t{kMostSparseTokens} * shape.kv_heads * slots * std::int64_t{sizeof(std::int32_t)} * 5 /
         4;
}

}  // namespace

ActiveTier::Room ActiveTier::room_for(const KvShape& shape, std::int64_t memory) {
  const cuda::KvLayout layout = layout_of(shape);
  const std::int64_t page = cuda::page_bytes(), block = layout.block_stride();
  const std::int64_t begin = (layout.layer_bytes(shape.max_tokens) + page - 1) / page * page;
  const std::int64_t first = (begin + block - 1) / block;
  const std::int64_t end = (begin + memory / (page * shape.layers) * page) / block;
  if (end <= first) {
    const std::int64_t pages = (std::max(page, 2 * block) + page - 1) / page;
    throw InputError(
        fmt::format("--active-memory: expected {} MiB or more, a page for each of {} layers, found {}",
                    (pages * page * shape.layers + (1 << 20) - 1) >> 20, shape.layers, memory));
  }
  const std::int64_t slots = std::min(ActiveKeys::kMostSlots, (end - first) * cuda::kBlockTokens);
  const std::int64_t last_page =
      (layout.layer_bytes(first * cuda::kBlockTokens + slots) + page - 1) / page * page;
  return {.first_row = first * cuda::kBlockTokens,
          .slots = slots,
          .bytes = (last_page - begin) * shape.layers + most_moves(shape) * move_bytes(shape) +
                   counts_bytes(shape) + lists_bytes(shape, slots)};
}

ActiveTier::ActiveTier(const KvShape& shape, const Room& room, ThreadPool& pool, cuda::KvRange& range)
    : shape_(shape),
      room_(room),
      pool_(pool),
      range_(range),
      keys_(shape.layers, shape.kv_heads, room.slots),
      staged_(most_moves(shape) * move_bytes(shape)),
      upload_(staged_.bytes(), "keys that become active"),
      staged_counts_(counts_bytes(shape)),
      counts_(staged_counts_.bytes(), "counts of active keys") {
  range_.hold(room_.first_row, room_.end());
}

void ActiveTier::begin_step(const void* method, std::int64_t tokens, std::int64_t count, const KvStore& store,
                            cuda::StreamHandle stream) {
  if (method != method_) keys_.clear();
  method_ = method;
  noted_ = tokens + count;  // first: should what follows fail, the step's rollback forgets what it has begun
  if (tokens / ActiveKeys::kTokensPerUpdate != last_ / ActiveKeys::kTokensPerUpdate)
    send(keys_.update(pool_), store, stream);
  last_ = tokens;
}

/// Back to before tokens that were counted, nothing is active: what a question is given then depends on its
/// own tokens alone, however often it is asked.
void ActiveTier::roll_back(std::int64_t tokens) {
  if (tokens >= noted_) return;
  keys_.clear();
  noted_ = 0;
}

/// The last step has ended, and with it what read the pinned memory.
void ActiveTier::send(const std::vector<ActiveKeys::Move>& moves, const KvStore& store,
                      cuda::StreamHandle stream) {
  if (moves.empty()) return;
  const cuda::KvLayout& layout = range_.layout();
  const auto count = std::ssize(moves);
  const std::int64_t row = layout.row_bytes(), rows_at = count * std::int64_t{sizeof(std::int64_t)};
  auto* const places = staged_.as<std::int64_t>();
  auto* const rows = staged_.as<std::byte>() + rows_at;
  pool_.for_each(count, [&](std::int64_t i, int) {
    const ActiveKeys::Move& move = moves[static_cast<std::size_t>(i)];
    places[i] =
        move.layer * layout.layer_stride + layout.key_offset(move.kv_head, room_.first_row + move.slot);
    for (const bool values : {false, true})
      copy_rows(store, move.layer, move.kv_head, values, move.row, move.row + 1, shape_.type,
                rows + (2 * i + (values ? 1 : 0)) * row);
  });
  const std::int64_t bytes = count * move_bytes(shape_);
  cuda::copy(upload_.as<void>(), staged_.as<void>(), bytes, stream);
  cuda::place_rows(range_.base(), layout, upload_.as<std::int64_t>(), upload_.as<char>() + rows_at, count,
                   stream);
  moved_ += bytes;
}

void ActiveTier::list(HostLists& near, std::int64_t count, cuda::StreamHandle stream) {
  listed_ = count * shape_.kv_heads;
  std::int64_t most = 0;
  auto* const counts = staged_counts_.as<std::int32_t>();
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (std::int64_t i = 0; i < listed_; ++i) {
      const auto active = std::ssize(keys_.rows(layer, static_cast<int>(i % shape_.kv_heads)));
      most = std::max<std::int64_t>(most, active);
      counts[layer * listed_ + i] = static_cast<std::int32_t>(near.listed(i) + active);
    }
  }
  near.add_to_all(static_cast<Position>(room_.first_row), static_cast<Position>(room_.first_row + most));
  cuda::copy(counts_.as<void>(), counts, shape_.layers * listed_ * std::int64_t{sizeof(std::int32_t)},
             stream);
}

const std::int32_t* ActiveTier::counts(int layer) const {
  return counts_.as<std::int32_t>() + layer * listed_;
}

std::int64_t ActiveTier::active(int layer) const {
  std::int64_t sum = 0;
  for (int head = 0; head < shape_.kv_heads; ++head) sum += std::ssize(keys_.rows(layer, head));
  return sum;
}

}  // namespace lode
