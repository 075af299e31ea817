// SPDX-License-Identifier: Apache-2.0
#include "ann/hashing/half_tables.h"

#include <algorithm>
#include <numeric>

namespace lode {

namespace {

constexpr std::size_t kCells = std::size_t{1} << 16;
constexpr std::size_t kAhead = 16;  // cells that memory is asked for ahead

/// One that holds keys.
struct Cell {
  std::uint32_t first, last;
  int cost;
};

using Costs = std::array<std::uint16_t, 256>;

/// The values of a byte, cheapest first.
std::array<std::uint8_t, 256> by_cost(const Costs& costs) {
  std::array<std::uint8_t, 256> order;
  std::iota(order.begin(), order.end(), std::uint8_t{0});
  std::sort(order.begin(), order.end(), [&](std::uint8_t a, std::uint8_t b) { return costs[a] < costs[b]; });
  return order;
}

/// The cells of a table that hold keys and cost no more than `most`.
std::vector<Cell> cells_of(std::span<const std::uint32_t> first, const Costs& low, const Costs& high,
                           int most) {
  const std::array<std::uint8_t, 256> order = by_cost(low);
  std::vector<Cell> cells(256);
  std::size_t used = 0;
  for (std::size_t above = 0; above < 256; ++above) {
    if (high[above] > most) continue;
    if (cells.size() < used + 256) cells.resize(2 * cells.size() + 256);
    for (const std::uint8_t below : order) {
      const int cost = high[above] + low[below];
      if (cost > most) break;
      const std::size_t cell = above << 8 | below;
      cells[used] = {first[cell], first[cell + 1], cost};
      used += first[cell] < first[cell + 1] ? 1 : 0;
    }
  }
  cells.resize(used);
  return cells;
}

}  // namespace

ByteCosts::ByteCosts(const std::uint32_t* queries, int count) {
  for (int bit = 0; bit < 32; ++bit) {
    int ones = 0;
    for (int q = 0; q < count; ++q) ones += static_cast<int>(queries[q] >> bit & 1u);
    const int least = std::min(ones, count - ones);
    avoided_by_none += least;
    Costs& costs = of_byte[static_cast<std::size_t>(bit / 8)];
    for (unsigned value = 0; value < 256; ++value) {
      const int mismatches = (value >> bit % 8 & 1u) != 0 ? count - ones : ones;
      costs[value] = static_cast<std::uint16_t>(costs[value] + mismatches - least);
    }
  }
}

std::int64_t HalfTables::bytes_of(std::int64_t keys) {
  return 2 * (static_cast<std::int64_t>((kCells + 1) * sizeof(std::uint32_t)) +
              keys * static_cast<std::int64_t>(sizeof(Position) + sizeof(std::uint16_t)));
}

void HalfTables::build(std::span<const std::uint32_t> codes) {
  size_ = std::ssize(codes);
  for (int half = 0; half < 2; ++half) {
    Table table = {.first = std::vector<std::uint32_t>(kCells + 1, 0),
                   .keys = std::vector<Position>(codes.size()),
                   .other = std::vector<std::uint16_t>(codes.size())};
    const int own = half * 16, other = 16 - own;
    for (const std::uint32_t code : codes) ++table.first[(code >> own & 0xffffu) + 1];
    std::partial_sum(table.first.begin(), table.first.end(), table.first.begin());
    std::vector<std::uint32_t> next(table.first.begin(), table.first.end() - 1);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const std::uint32_t at = next[codes[i] >> own & 0xffffu]++;
      table.keys[at] = static_cast<Position>(i);
      table.other[at] = static_cast<std::uint16_t>(codes[i] >> other & 0xffffu);
    }
    tables_[static_cast<std::size_t>(half)] = std::move(table);
  }
}

HalfTables::Effort HalfTables::collect(const ByteCosts& costs, const Reach& reach, int most, std::int64_t end,
                                       HammingHits& near) const {
  Effort effort;
  if (reach.cost < 0 || size_ == 0) return effort;
  const auto own = static_cast<std::size_t>(2 * reach.half), other = 2 - own;
  const Table& table = tables_[static_cast<std::size_t>(reach.half)];
  const std::vector<Cell> cells =
      cells_of(table.first, costs.of_byte[own], costs.of_byte[own + 1], reach.cost);
  for (const Cell& cell : cells) effort.keys += cell.last - cell.first;
  effort.cells = std::ssize(cells);
  near.make_room(effort.keys);
  const Costs &below = costs.of_byte[other], &above = costs.of_byte[other + 1];
  Position* key = near.next_key();
  std::uint16_t* distance = near.next_distance();
  for (std::size_t c = 0; c < cells.size(); ++c) {
    const Cell& ahead = cells[std::min(c + kAhead, cells.size() - 1)];
    __builtin_prefetch(table.other.data() + ahead.first);
    __builtin_prefetch(table.keys.data() + ahead.first);
    const Cell& cell = cells[c];
    for (std::uint32_t i = cell.first; i < cell.last; ++i) {
      const int rest = below[table.other[i] & 0xff] + above[table.other[i] >> 8];
      // Written in any case and kept if it fits: what fits cannot be foreseen.
      *key = table.keys[i];
      *distance = static_cast<std::uint16_t>(costs.avoided_by_none + cell.cost + rest);
      const int kept = static_cast<int>(rest > reach.least_other) &
                       static_cast<int>(cell.cost + rest <= most) & static_cast<int>(*key < end);
      key += kept;
      distance += kept;
    }
  }
  near.size = key - near.keys.data();
  return effort;
}

HalfTables::Effort HalfTables::collect(const ByteCosts& costs, int limit, int low, std::int64_t end,
                                       HammingHits& near) const {
  const int most = limit - costs.avoided_by_none;
  Effort effort =
      collect(costs, {.half = 0, .least_other = -1, .cost = std::min(low, most)}, most, end, near);
  const Effort high =
      collect(costs, {.half = 1, .least_other = low, .cost = most - low - 1}, most, end, near);
  effort.cells += high.cells;
  effort.keys += high.keys;
  return effort;
}

std::int64_t cells_within(const ByteCosts& costs, int half, int most) {
  const auto own = static_cast<std::size_t>(2 * half);
  Costs sorted = costs.of_byte[own];
  std::sort(sorted.begin(), sorted.end());
  std::int64_t cells = 0;
  for (const int high : costs.of_byte[own + 1])
    cells += std::upper_bound(sorted.begin(), sorted.end(), most - high) - sorted.begin();
  return cells;
}

}  // namespace lode
