// SPDX-License-Identifier: Apache-2.0
#include "gpu/active_keys.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <utility>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::uint16_t kLeastFinds = 4;  // by one of the group's heads in each fourth token, say
constexpr std::int64_t kTablePerSlot = 8, kLeastTable = 1024;
constexpr auto kMostFinds = std::numeric_limits<std::uint16_t>::max();

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

ActiveKeys::ActiveKeys(int layers, int kv_heads, std::int64_t slots)
    : kv_heads_(kv_heads),
      slots_(slots),
      table_size_(std::bit_ceil(at(std::max(kLeastTable, kTablePerSlot * slots)))),
      heads_(at(std::int64_t{layers} * kv_heads)) {
  LODE_ASSERT(slots >= 1 && slots <= kMostSlots);
}

void ActiveKeys::clear() {
  if (!any_found_) return;
  std::fill(heads_.begin(), heads_.end(), Head());
  any_found_ = false;
}

/// The key's entry, or the free one where it would be. A table is never full.
ActiveKeys::Entry& ActiveKeys::place_of(Head& head, Position row) const {
  std::size_t i =
      static_cast<std::uint32_t>(row) * std::uint64_t{0x9E3779B97F4A7C15} >> 40 & (table_size_ - 1);
  while (head.table[i].row != row && head.table[i].row >= 0) i = (i + 1) & (table_size_ - 1);
  return head.table[i];
}

/// Counts a key; whether it is active. When very many keys were found since the last update, new ones wait.
bool ActiveKeys::note(Head& head, Position row, std::int64_t finds) const {
  Entry& entry = place_of(head, row);
  if (entry.row < 0) {
    if (head.used * 4 >= static_cast<std::int64_t>(table_size_) * 3) return false;
    ++head.used;
    entry.row = row;
  }
  entry.finds = static_cast<std::uint16_t>(std::min<std::int64_t>(entry.finds + finds, kMostFinds));
  return entry.slot >= 0;
}

std::int64_t ActiveKeys::take_set(Head& head, const Selection::Set& set, Selection& rest) const {
  const std::int64_t tokens = set.queries.token_end - set.queries.token_begin;
  std::int64_t hits = 0;
  const auto is_active = [&](Position row) {
    const bool active = note(head, row, tokens);
    hits += active ? tokens : 0;
    return active;
  };
  rest.add_set(set.queries);
  for (const Run& run : set.runs) {
    Position begin = run.begin;
    // A run longer than there is room for says nothing of its keys.
    const bool tells = run.end - run.begin <= slots_;
    for (Position row = begin; row < run.end && (tells || !head.rows.empty()); ++row) {
      if (tells ? !is_active(row) : place_of(head, row).slot < 0) continue;
      hits += tells ? 0 : tokens;
      if (begin < row) rest.add_run(begin, row);
      begin = row + 1;
    }
    if (begin < run.end) rest.add_run(begin, run.end);
  }
  const bool weighted = !set.log_weights.empty();
  std::vector<Position> plain;
  for (std::size_t i = 0; i < set.rows.size(); ++i) {
    if (is_active(set.rows[i])) continue;
    if (weighted) {
      rest.add_row(set.rows[i], set.log_weights[i]);
    } else {
      plain.push_back(set.rows[i]);
    }
  }
  rest.add_rows(plain);
  return hits;
}

std::int64_t ActiveKeys::take(int layer, const Selection& found, Selection& rest, ThreadPool& pool) {
  any_found_ = true;
  std::vector<std::vector<std::int64_t>> sets(at(kv_heads_));
  for (std::int64_t i = 0; i < found.sets(); ++i) sets[at(found.set(i).queries.kv_head)].push_back(i);
  std::vector<Selection> rests(sets.size());
  std::vector<std::int64_t> hits(sets.size(), 0);
  pool.for_each(kv_heads_, [&](std::int64_t kv_head, int) {
    Head& head = heads_[at(layer * std::int64_t{kv_heads_} + kv_head)];
    if (head.table.empty()) head.table.resize(table_size_);
    for (const std::int64_t i : sets[at(kv_head)]) {
      const Selection::Set set = found.set(i);
      hits[at(kv_head)] += take_set(head, set, rests[at(kv_head)]);
      if (set.tail_lse.empty()) continue;
      rests[at(kv_head)].set_tail(set.tail_output, set.tail_lse);
      head.estimates = true;
    }
  });
  rest.clear();
  std::int64_t all = 0;
  for (std::size_t head = 0; head < sets.size(); ++head) {
    rest.append(rests[head]);
    all += hits[head];
  }
  return all;
}

/// The keys found most often that are not active take slots, of at most kMovesPerUpdate.
void ActiveKeys::promote(Head& head, std::vector<Move>& moves) const {
  const auto more_found = [](const Entry& a, const Entry& b) {
    return std::tuple(-a.finds, a.row) < std::tuple(-b.finds, b.row);
  };
  std::vector<Entry> wanted, active;
  for (const Entry& entry : head.table) {
    if (entry.slot >= 0) active.push_back(entry);
    if (entry.slot < 0 && entry.finds >= kLeastFinds) wanted.push_back(entry);
  }
  std::sort(wanted.begin(), wanted.end(), more_found);
  std::sort(active.begin(), active.end(), more_found);
  for (const Entry& entry : wanted) {
    if (moves.size() == kMovesPerUpdate) return;
    auto slot = static_cast<std::int16_t>(head.rows.size());
    if (slot < slots_) {
      head.rows.push_back(entry.row);
    } else if (!active.empty() && entry.finds > 2 * active.back().finds) {
      slot = std::exchange(place_of(head, active.back().row).slot, std::int16_t{-1});
      active.pop_back();
      head.rows[at(slot)] = entry.row;
    } else {
      return;
    }
    place_of(head, entry.row).slot = slot;
    moves.push_back({.slot = slot, .row = entry.row});
  }
}

/// Active keys that are found no more make room: the last slot's key goes to theirs.
void ActiveKeys::leave(Head& head, std::vector<Move>& moves) const {
  for (auto slot = static_cast<std::int32_t>(std::ssize(head.rows)); slot-- > 0;) {
    if (moves.size() == kMovesPerUpdate) return;
    Entry& entry = place_of(head, head.rows[at(slot)]);
    if (entry.finds > 0) continue;
    entry.slot = -1;
    const Position last = head.rows.back();
    head.rows.pop_back();
    if (slot == std::ssize(head.rows)) continue;
    head.rows[at(slot)] = last;
    place_of(head, last).slot = static_cast<std::int16_t>(slot);
    moves.push_back({.slot = slot, .row = last});
  }
}

/// Halves the counts; entries of keys that are neither found any more nor active go.
void ActiveKeys::fade(Head& head) const {
  std::vector<Entry> before(table_size_);
  before.swap(head.table);
  head.used = 0;
  for (const Entry& entry : before) {
    if (entry.slot < 0 && entry.finds < 2) continue;
    place_of(head, entry.row) = {entry.row, static_cast<std::uint16_t>(entry.finds / 2), entry.slot};
    ++head.used;
  }
}

std::vector<ActiveKeys::Move> ActiveKeys::update(ThreadPool& pool) {
  std::vector<Move> all;
  if (!any_found_) return all;
  std::vector<std::vector<Move>> moves(heads_.size());
  pool.for_each(std::ssize(heads_), [&](std::int64_t i, int) {
    Head& head = heads_[at(i)];
    if (head.table.empty()) return;
    if (head.estimates) {
      head.rows.clear();
      head.table.assign(table_size_, Entry());
      head.used = 0;
      return;
    }
    promote(head, moves[at(i)]);
    leave(head, moves[at(i)]);
    fade(head);
  });
  for (std::size_t i = 0; i < moves.size(); ++i) {
    for (Move move : moves[i]) {
      move.layer = static_cast<int>(i) / kv_heads_;
      move.kv_head = static_cast<int>(i) % kv_heads_;
      all.push_back(move);
    }
  }
  return all;
}

}  // namespace lode
