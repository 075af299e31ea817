// SPDX-License-Identifier: Apache-2.0
#include "attend/mass.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/exponentials.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

// Peaks are of queries that the kernels may have rounded: what lies so little below the least is looked at too.
constexpr float kPeakMargin = 0.25f;         // of a logarithm
constexpr std::int64_t kLargeTogether = 16;  // tokens a thread whose masses are few

/// Keys of one token and the mass that each received.
struct TokenMass {
  std::vector<Position> rows;  // rising
  std::vector<float> mass;     // [rows]
};

/// Keys of a set for one token, at rising positions.
struct KeyList {
  std::vector<Position> rows;
  std::vector<float> log_weights;  // empty = all zero
  bool unbroken() const { return !rows.empty() && rows.back() - rows.front() + 1 == std::ssize(rows); }
};

void list_keys(const FarKeys& far, const QueryBlock& block, std::int64_t token, const LocalWindow& dense,
               KeyList& keys) {
  keys.rows.clear();
  keys.log_weights.clear();
  const Position far_end = block.far_end(token, dense), end = block.begin + static_cast<Position>(token) + 1;
  const auto add = [&](Position from, Position to) {
    if (from >= to) return;
    const std::size_t before = keys.rows.size();
    keys.rows.resize(before + static_cast<std::size_t>(to - from));
    std::iota(keys.rows.begin() + static_cast<std::ptrdiff_t>(before), keys.rows.end(), from);
  };
  add(0, std::min(block.far_begin, end));
  for (const Position row : far.plain) add(row, std::min(row + 1, far_end));
  for (const Run& run : far.runs) add(run.begin, std::min(run.end, far_end));
  const std::size_t unweighted = keys.rows.size();
  for (std::size_t i = 0; i < far.rows.size() && far.rows[i] < far_end; ++i) keys.rows.push_back(far.rows[i]);
  const std::size_t weighted = keys.rows.size() - unweighted;
  add(far_end, end);
  if (far.rows.empty()) return;
  std::vector<std::pair<Position, float>> sorted(keys.rows.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const bool has_weight = i >= unweighted && i < unweighted + weighted;
    sorted[i] = {keys.rows[i], has_weight ? far.log_weights[i - unweighted] : 0.0f};
  }
  std::sort(sorted.begin(), sorted.end());
  keys.log_weights.resize(sorted.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) std::tie(keys.rows[i], keys.log_weights[i]) = sorted[i];
}

/// Scores of scaled queries with keys at rising positions, [queries, keys]; those behind the seam lie in the tail's rows.
void score_keys(const float* q, int queries, const QueryBlock& block, const TailRows* tail, std::size_t head,
                const KeyList& keys, std::vector<float>& scores) {
  const std::vector<Position>& rows = keys.rows;
  const auto count = std::ssize(rows);
  const auto before =
      tail == nullptr ? count : std::lower_bound(rows.begin(), rows.end(), tail->seam) - rows.begin();
  scores.resize(rows.size() * static_cast<std::size_t>(queries));
  const auto part = [&](const KvRows& kv, const Position* at, std::int64_t n, float* to) {
    if (n == 0) return;
    if (keys.unbroken()) return kernels().score_run(q, queries, kv, at[0], at[0] + n, to, count);
    kernels().score_rows(q, queries, kv, at, n, to, count);
  };
  part(block.kv.heads[head], rows.data(), before, scores.data());
  if (before == count) return;
  std::vector<Position> own(rows.begin() + before, rows.end());
  for (Position& row : own) row -= tail->seam;
  part(tail->kv.heads[head], own.data(), std::ssize(own), scores.data() + before);
}

/// The largest of the scores; sixteen at a time, since one after the other each would wait for the one before.
float largest(std::span<const float> scores) {
  constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> high;
  high.fill(-std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + kLanes <= scores.size(); i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      high[lane] = high[lane] < scores[i + lane] ? scores[i + lane] : high[lane];
  for (; i < scores.size(); ++i) high[0] = std::max(high[0], scores[i]);
  return *std::max_element(high.begin(), high.end());
}

/// Scores to masses in place: of a log-sum-exp when it is given, else of their own sum. NaN when a score is.
void weigh(std::span<float> scores, const float* lse) {
  const float peak = largest(scores);
  double total = exponential_kernels().weigh(scores.data(), nullptr, std::ssize(scores));
  if (total == 0.0) total = std::numeric_limits<double>::quiet_NaN();
  const bool own = lse == nullptr || std::isnan(total);
  const auto share = static_cast<float>(own ? 1.0 / total : std::exp(double{peak} - *lse));
  for (float& score : scores) score *= share;
}

/// Adds one query's masses to `mass`, which is indexed by position.
void add_query(const KeyList& keys, std::span<float> scores, const float* lse, std::vector<float>& mass) {
  for (std::size_t i = 0; i < keys.log_weights.size(); ++i) scores[i] += keys.log_weights[i];
  weigh(scores, lse);
  if (keys.unbroken()) {
    float* const to = mass.data() + keys.rows.front();
    for (std::size_t i = 0; i < scores.size(); ++i) to[i] = std::max(to[i], 0.0f) + scores[i];
    return;
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    float& sum = mass[static_cast<std::size_t>(keys.rows[i])];
    sum = std::max(sum, 0.0f) + scores[i];
  }
}

/// One token of a group, with all that its masses are made of.
struct Unit {
  const SetGroup& group;
  const QueryBlock& block;
  const TailRows* tail;
  const LayerGeometry& geometry;
  std::int64_t token;
  const std::vector<float>& lse;  // [T, Hq]
  const KeyPeaks& peaks;
};

/// Appends a query [d] of [T, Hq] as the kernels take it.
void add_scaled(const Unit& unit, std::int64_t query, std::vector<float>& q) {
  for (int i = 0; i < unit.geometry.head_dim; ++i)
    q.push_back(unit.block.q[static_cast<std::size_t>(query * unit.geometry.head_dim + i)] *
                unit.geometry.scale);
}

/// Scores of some heads' queries with the keys, and where the queries stand in [T, Hq]. All heads are scored in
/// one pass, so that each key is read once.
struct Scored {
  std::vector<std::int64_t> queries;
  std::vector<float> scores;  // [queries, keys]

  Scored(const Unit& unit, std::uint32_t heads, const KeyList& keys) {
    const LayerGeometry& geometry = unit.geometry;
    std::vector<float> q;
    for (std::uint32_t rest = heads; rest != 0; rest &= rest - 1) {
      queries.push_back(unit.token * geometry.query_heads +
                        std::int64_t{unit.group.kv_head} * geometry.group() + std::countr_zero(rest));
      add_scaled(unit, queries.back(), q);
    }
    score_keys(q.data(), static_cast<int>(queries.size()), unit.block, unit.tail,
               static_cast<std::size_t>(unit.group.kv_head), keys, scores);
  }
  std::span<float> of(std::size_t query, const KeyList& keys) {
    return std::span(scores).subspan(query * keys.rows.size(), keys.rows.size());
  }
};

/// Adds the masses of one set's heads to `mass`, which is indexed by position; -1 marks keys not attended.
/// Without a tail they are shares of their own sum: the kernels that made `lse` may round queries.
void add_set(const Unit& unit, std::size_t s, std::vector<float>& mass) {
  const Selection::Set& set = unit.group.sets[s];
  KeyList keys;
  list_keys(unit.group.far[s], unit.block, unit.token, unit.geometry.dense, keys);
  Scored scored(unit, set.queries.heads, keys);
  for (std::size_t i = 0; i < scored.queries.size(); ++i)
    add_query(keys, scored.of(i, keys),
              set.tail_lse.empty() ? nullptr : &unit.lse[static_cast<std::size_t>(scored.queries[i])], mass);
}

/// What was attended, in front of `out`.
void collect(const std::vector<float>& mass, TokenMass& out) {
  out.rows.resize(mass.size());
  out.mass.resize(mass.size());
  std::size_t count = 0;
  for (std::size_t row = 0; row < mass.size(); ++row) {
    out.rows[count] = static_cast<Position>(row);
    out.mass[count] = mass[row];
    count += mass[row] != -1.0f;
  }
  out.rows.resize(count);
  out.mass.resize(count);
}

/// The unit's keys that are worth looking at: stretches that hold a large one, and those behind them.
std::vector<Run> large_stretches(const Unit& unit, const float* lse /*[heads]*/, float least) {
  const float least_log = std::log(least) - kPeakMargin;
  std::vector<Run> runs;
  const auto add = [&](Position from, Position to) {
    if (from >= to) return;
    if (!runs.empty() && runs.back().end == from && (unit.tail == nullptr || from != unit.tail->seam))
      runs.back().end = to;
    else
      runs.push_back({from, to});
  };
  const float* peaks = unit.peaks.peaks.data() + unit.peaks.first;
  for (Position at = 0; at < unit.peaks.end; at += AttendItem::kPeakKeys, peaks += unit.peaks.stride) {
    bool large = false;
    for (int h = 0; h < unit.geometry.group(); ++h)
      large |= !(peaks[h] - lse[h] < least_log);  // NaN is looked at
    if (large) add(at, std::min<Position>(at + AttendItem::kPeakKeys, unit.peaks.end));
  }
  add(unit.peaks.end, unit.block.begin + static_cast<Position>(unit.token) + 1);
  return runs;
}

/// Masses of the keys in stretches that hold a large one, and of those behind them.
void find_large(const Unit& unit, float least, TokenMass& out) {
  const int group = unit.geometry.group();
  const auto head = static_cast<std::size_t>(unit.group.kv_head);
  const std::int64_t first =
      unit.token * unit.geometry.query_heads + std::int64_t{unit.group.kv_head} * group;
  const float* const lse = unit.lse.data() + first;
  const std::vector<Run> runs = large_stretches(unit, lse, least);
  out.rows.clear();
  for (const Run& run : runs)
    for (Position row = run.begin; row < run.end; ++row) out.rows.push_back(row);
  const std::size_t count = out.rows.size();
  std::vector<float> q, scores(static_cast<std::size_t>(group) * count);
  for (int h = 0; h < group; ++h) add_scaled(unit, first + h, q);
  std::int64_t at = 0;
  for (const Run& run : runs) {
    const bool behind = unit.tail != nullptr && run.begin >= unit.tail->seam;
    const Position seam = behind ? unit.tail->seam : 0;
    LODE_ASSERT(behind || unit.tail == nullptr || run.end <= unit.tail->seam);
    kernels().score_attended(q.data(), group, behind ? unit.tail->kv.heads[head] : unit.block.kv.heads[head],
                             run.begin - seam, run.end - seam, scores.data() + at, std::ssize(out.rows));
    at += run.end - run.begin;
  }
  out.mass.assign(count, 0.0f);
  for (std::size_t h = 0; h < static_cast<std::size_t>(group) && count > 0; ++h) {
    const std::span<float> masses = std::span(scores).subspan(h * count, count);
    weigh(masses, lse + h);
    for (std::size_t i = 0; i < count; ++i) out.mass[i] += masses[i];
  }
}

void find_all(const Unit& unit, TokenMass& out) {
  std::vector<float> mass(static_cast<std::size_t>(unit.block.begin + unit.token + 1), -1.0f);
  for (std::size_t s = 0; s < unit.group.sets.size(); ++s) add_set(unit, s, mass);
  collect(mass, out);
}

}  // namespace

void report_mass(const Attended& attended, const LayerGeometry& geometry, const MassSink& sink) {
  std::vector<Unit> units;
  bool large_only = true;
  for (std::size_t g = 0; g < attended.groups.size(); ++g) {
    const SetGroup& group = attended.groups[g];
    large_only &= !attended.peaks[g].peaks.empty();
    for (std::int64_t t = group.token_begin; t < group.token_end; ++t)
      units.push_back({group, attended.blocks[group.block], tail_of(attended.tails, group.block), geometry, t,
                       attended.lse[group.block], attended.peaks[g]});
  }
  // A few tokens at a time: the masses of a whole chunk over a long context would not fit into memory.
  const std::int64_t batch = geometry.pool->size() * (large_only ? kLargeTogether : 1);
  std::vector<TokenMass> found(static_cast<std::size_t>(batch));
  for (std::int64_t at = 0; at < std::ssize(units); at += batch) {
    check_cancel();
    const std::int64_t count = std::min(batch, std::ssize(units) - at);
    geometry.pool->for_each(count, [&](std::int64_t item, int) {
      const Unit& unit = units[static_cast<std::size_t>(at + item)];
      TokenMass& to = found[static_cast<std::size_t>(item)];
      unit.peaks.peaks.empty() ? find_all(unit, to) : find_large(unit, sink.least, to);
    });
    for (std::int64_t item = 0; item < count; ++item) {
      const Unit& unit = units[static_cast<std::size_t>(at + item)];
      const TokenMass& m = found[static_cast<std::size_t>(item)];
      sink.report({.sequence = unit.block.sequence,
                   .kv_head = unit.group.kv_head,
                   .query = unit.block.begin + static_cast<Position>(unit.token),
                   .rows = m.rows,
                   .mass = m.mass});
    }
  }
}

}  // namespace lode
