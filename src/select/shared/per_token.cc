// SPDX-License-Identifier: Apache-2.0
#include "select/shared/per_token.h"

#include <algorithm>
#include <functional>

#include "base/cancel.h"
#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

PerTokenSelector::PerTokenSelector(const LayerGeometry& geometry) : geometry_(geometry) {
  LODE_ASSERT(geometry.kv_heads > 0 && geometry.query_heads % geometry.kv_heads == 0 &&
              geometry.group() <= 32);
}

int PerTokenSelector::workers() const {
  return geometry_.pool != nullptr ? geometry_.pool->size() : 1;
}

void PerTokenSelector::for_each(std::int64_t items,
                                const std::function<void(std::int64_t, int)>& body) const {
  if (geometry_.pool != nullptr) {
    geometry_.pool->for_each(items, body);
  } else {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
  }
}

bool PerTokenSelector::divide(const KeyShare& share) {
  if (!divides()) return false;
  share_ = share;
  sink_ = geometry_.dense.sink;
  geometry_.dense.sink = std::max(geometry_.dense.sink, share.own.begin);
  return true;
}

void PerTokenSelector::add_units(const QueryBlock& block) {
  for (std::int64_t token = 0; token < block.tokens; ++token) {
    const Position all_end = block.far_end(token, geometry_.dense);
    Position begin = block.far_begin, end = all_end;
    if (share_.divided()) {
      begin = static_cast<Position>(std::max<std::int64_t>(begin, share_.own.begin));
      end = static_cast<Position>(std::max<std::int64_t>(begin, std::min<std::int64_t>(end, share_.own.end)));
    }
    for (int head = 0; head < geometry_.kv_heads; ++head)
      units_.push_back({&block, token, head, begin, end, block.far_begin, all_end, units_.size()});
  }
}

void PerTokenSelector::choose_units(std::size_t begin, std::size_t end) {
  for_each(static_cast<std::int64_t>(end - begin), [&](std::int64_t item, int worker) {
    const auto i = begin + static_cast<std::size_t>(item);
    chosen_[i].clear();
    if (units_[i].all_far_keys() > 0) {
      choose(units_[i], worker, chosen_[i], unit_work_[i]);
    } else {
      chosen_[i].add_set(units_[i].set(all_heads(geometry_.group())));
    }
  });
  if (share_.divided()) keep_best(begin, end);
}

void PerTokenSelector::select(std::span<const QueryBlock> blocks, Selection& out) {
  // Candidates of units that compete at once are held in memory: all ranks cut the units at the same places.
  constexpr std::int64_t kKeysAtOnce = std::int64_t{1} << 24;
  check_cancel();
  units_.clear();
  for (const QueryBlock& block : blocks) add_units(block);
  if (chosen_.size() < units_.size()) chosen_.resize(units_.size());
  unit_work_.assign(units_.size(), {});
  if (share_.divided()) ranked_.resize(std::max(ranked_.size(), units_.size()));
  for (std::size_t begin = 0, end = 0; begin < units_.size(); begin = end) {
    std::int64_t keys = 0;
    while (end < units_.size() && (!share_.divided() || keys < kKeysAtOnce))
      keys += units_[end++].all_far_keys();
    choose_units(begin, end);
  }
  for (std::size_t i = 0; i < units_.size(); ++i) {
    out.append(chosen_[i]);
    work_.bytes += unit_work_[i].bytes;
    work_.keys_scored += unit_work_[i].keys_scored;
  }
}

void PerTokenSelector::rank_rows(const SelectUnit& unit, const RankRule& rule, std::span<const Position> rows,
                                 std::span<const float> scores) {
  if (!share_.divided() || rule.budget <= 0) return;
  LODE_ASSERT(rows.size() == scores.size());
  const auto set = static_cast<std::size_t>(chosen_[unit.number].sets() - 1);
  RankedSet& ranked = ranked_[unit.number].emplace_back(
      RankedSet{.set = set, .rule = rule, .keys = {.budget = rule.budget, .keys = {}}});
  for (std::size_t i = 0; i < rows.size(); ++i) ranked.keys.keys.push_back(ranked_key(scores[i], rows[i]));
  std::ranges::sort(ranked.keys.keys, std::greater<>());
}

namespace {

/// Whether a key is chosen.
bool follows(const RankRule& rule, const ChosenKeys& chosen, std::uint64_t key) {
  if (score_of_key(key) < score_of_key(chosen.best) - rule.depth) return false;
  return rule.all_ties ? score_of_key(key) >= score_of_key(chosen.last) : key >= chosen.last;
}

}  // namespace

/// Takes the rows off that are not among the best of all ranks.
void PerTokenSelector::keep_best(std::size_t begin, std::size_t end) {
  std::vector<RankedKeys> choices;
  for (std::size_t i = begin; i < end; ++i)
    for (RankedSet& ranked : ranked_[i]) choices.push_back(std::move(ranked.keys));
  const std::vector<ChosenKeys> chosen = choose_over_ranks(*share_.ranks, choices);
  std::size_t choice = 0;
  std::vector<Position> rows;
  for (std::size_t i = begin; i < end; ++i) {
    if (ranked_[i].empty()) continue;
    Selection kept;
    std::size_t next = 0;
    for (std::int64_t s = 0; s < chosen_[i].sets(); ++s) {
      const Selection::Set set = chosen_[i].set(s);
      kept.add_set(set.queries);
      for (const Run& run : set.runs) kept.add_run(run.begin, run.end);
      if (next == ranked_[i].size() || ranked_[i][next].set != static_cast<std::size_t>(s)) {
        kept.add_rows(set.rows);
        continue;
      }
      rows.clear();
      for (const std::uint64_t key : choices[choice].keys)
        if (follows(ranked_[i][next].rule, chosen[choice], key)) rows.push_back(row_of(key));
      std::ranges::sort(rows);
      kept.add_rows(rows);
      ++next, ++choice;
    }
    chosen_[i] = std::move(kept);
    ranked_[i].clear();
  }
}

bool divide_keys(Selector* selector, const KeyShare& share) {
  auto* const own = dynamic_cast<PerTokenSelector*>(selector);
  return own != nullptr && own->divide(share);
}

bool is_divided(const Selector* selector) {
  const auto* const own = dynamic_cast<const PerTokenSelector*>(selector);
  return own != nullptr && own->share().divided();
}

}  // namespace lode
