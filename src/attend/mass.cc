// SPDX-License-Identifier: Apache-2.0
#include "attend/mass.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

/// Keys of one token and the mass that each received.
struct TokenMass {
  std::vector<Position> rows;  // rising
  std::vector<float> mass;     // [rows]
};

/// Every key of a set for one token, as rows with log-weights.
void list_keys(const FarKeys& far, const QueryBlock& block, std::int64_t token, const LocalWindow& dense,
               std::vector<std::pair<Position, float>>& keys) {
  keys.clear();
  const Position far_end = block.far_end(token, dense), end = block.begin + static_cast<Position>(token) + 1;
  const auto add = [&](Position from, Position to) {
    for (Position row = from; row < to; ++row) keys.emplace_back(row, 0.0f);
  };
  add(0, std::min(block.far_begin, end));
  for (const Position row : far.plain) add(row, std::min(row + 1, far_end));
  for (const Run& run : far.runs) add(run.begin, std::min(run.end, far_end));
  for (std::size_t i = 0; i < far.rows.size() && far.rows[i] < far_end; ++i)
    keys.emplace_back(far.rows[i], far.log_weights[i]);
  add(far_end, end);
  if (!far.rows.empty()) std::sort(keys.begin(), keys.end());
}

/// Scores of one scaled query with keys at rising positions, those behind the seam in the tail's rows.
void score_keys(const float* q, const QueryBlock& block, const TailRows* tail, std::size_t head,
                std::span<Position> rows, std::vector<float>& scores) {
  const auto seam = tail == nullptr ? rows.end() : std::lower_bound(rows.begin(), rows.end(), tail->seam);
  const auto before = seam - rows.begin(), behind = rows.end() - seam;
  scores.resize(rows.size());
  kernels().score_rows(q, 1, block.kv.heads[head], rows.data(), before, scores.data(), std::ssize(scores));
  if (behind == 0) return;
  std::vector<Position> own(seam, rows.end());
  for (Position& row : own) row -= tail->seam;
  kernels().score_rows(q, 1, tail->kv.heads[head], own.data(), behind, scores.data() + before,
                       std::ssize(scores));
}

/// Adds the weights of one set's heads to `mass`, which is indexed by position; -1 marks keys not attended.
/// Without a tail they are shares of their own sum: the kernels that made `lse` may round queries.
void add_set(const SetGroup& group, std::size_t s, const QueryBlock& block, const TailRows* tail,
             const LayerGeometry& geometry, std::int64_t token, const std::vector<float>& lse,
             std::vector<float>& mass) {
  const int d = geometry.head_dim;
  std::vector<std::pair<Position, float>> keys;
  list_keys(group.far[s], block, token, geometry.dense, keys);
  std::vector<Position> rows(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) rows[i] = keys[i].first;
  std::vector<float> scores(keys.size()), q(static_cast<std::size_t>(d));
  for (std::uint32_t rest = group.sets[s].queries.heads; rest != 0; rest &= rest - 1) {
    const std::int64_t query = token * geometry.query_heads + std::int64_t{group.kv_head} * geometry.group() +
                               std::countr_zero(rest);
    for (int i = 0; i < d; ++i)
      q[static_cast<std::size_t>(i)] = block.q[static_cast<std::size_t>(query * d + i)] * geometry.scale;
    score_keys(q.data(), block, tail, static_cast<std::size_t>(group.kv_head), rows, scores);
    float peak = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < keys.size(); ++i) peak = std::max(peak, scores[i] += keys[i].second);
    double total = 0.0;
    for (float& score : scores) total += score = std::exp(score - peak);
    const bool all = group.sets[s].tail_lse.empty();
    const auto share =
        static_cast<float>(all ? 1.0 / total : std::exp(double{peak} - lse[static_cast<std::size_t>(query)]));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      float& sum = mass[static_cast<std::size_t>(rows[i])];
      sum = std::max(sum, 0.0f) + scores[i] * share;
    }
  }
}

}  // namespace

void report_mass(std::span<const SetGroup> groups, std::span<const QueryBlock> blocks,
                 std::span<const TailRows> tails, const LayerGeometry& geometry,
                 std::span<const std::vector<float>> lse, const MassSink& sink) {
  // A few tokens at a time: the masses of a whole chunk over a long context would not fit into memory.
  const std::int64_t batch = geometry.pool->size();
  struct Unit {
    const SetGroup* group;
    std::int64_t token;
  };
  std::vector<Unit> units;
  for (const SetGroup& group : groups) {
    for (std::int64_t t = group.token_begin; t < group.token_end; ++t) units.push_back({&group, t});
  }
  std::vector<TokenMass> found(static_cast<std::size_t>(batch));
  for (std::int64_t at = 0; at < std::ssize(units); at += batch) {
    check_cancel();
    const std::int64_t count = std::min(batch, std::ssize(units) - at);
    geometry.pool->for_each(count, [&](std::int64_t item, int) {
      const Unit& unit = units[static_cast<std::size_t>(at + item)];
      const QueryBlock& block = blocks[unit.group->block];
      const TailRows* const tail = tail_of(tails, unit.group->block);
      std::vector<float> mass(static_cast<std::size_t>(block.begin + unit.token + 1), -1.0f);
      for (std::size_t s = 0; s < unit.group->sets.size(); ++s) {
        add_set(*unit.group, s, block, tail, geometry, unit.token, lse[unit.group->block], mass);
      }
      TokenMass& out = found[static_cast<std::size_t>(item)];
      out = {};
      for (std::size_t row = 0; row < mass.size(); ++row) {
        if (mass[row] == -1.0f) continue;
        out.rows.push_back(static_cast<Position>(row));
        out.mass.push_back(mass[row]);
      }
    });
    for (std::int64_t item = 0; item < count; ++item) {
      const Unit& unit = units[static_cast<std::size_t>(at + item)];
      const TokenMass& m = found[static_cast<std::size_t>(item)];
      const QueryBlock& block = blocks[unit.group->block];
      sink({.sequence = block.sequence,
            .kv_head = unit.group->kv_head,
            .query = block.begin + static_cast<Position>(unit.token),
            .rows = m.rows,
            .mass = m.mass});
    }
  }
}

}  // namespace lode
