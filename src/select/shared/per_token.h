// SPDX-License-Identifier: Apache-2.0
// Base of methods whose query tokens choose one by one: what a token attends then depends neither on how its
// question was cut into chunks nor on what else is in the batch.
//
// Where keys lie on several ranks, a unit's far keys are those of this rank, and its choice is this rank's part: a
// method takes its best keys by the budget of all far keys, and says how good they are (rank_rows); the base then
// keeps those that are among the best of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lodestone/selector.h"
#include "select/rank_choice.h"

namespace lode {

/// One query token and KV head whose far part is not empty.
struct SelectUnit {
  const QueryBlock* block = nullptr;
  std::int64_t token = 0;  ///< in the block
  int kv_head = 0;
  Position far_begin = 0, far_end = 0;          ///< of the keys that are here
  Position all_far_begin = 0, all_far_end = 0;  ///< of all: budgets are shares of these
  std::size_t number = 0;                       ///< in its call

  Position position() const { return block->begin + static_cast<Position>(token); }
  const KvRows& kv() const { return block->kv.heads[static_cast<std::size_t>(kv_head)]; }
  std::int64_t far_keys() const { return std::int64_t{far_end} - far_begin; }
  std::int64_t all_far_keys() const { return std::int64_t{all_far_end} - all_far_begin; }
  /// Queries of the group, taken from all queries of the block.
  std::span<const float> group_of(std::span<const float> q /*[T, Hq, d]*/,
                                  const LayerGeometry& geometry) const {
    const auto d = static_cast<std::size_t>(geometry.head_dim),
               group = static_cast<std::size_t>(geometry.group());
    const auto row =
        static_cast<std::size_t>(token * geometry.query_heads + std::int64_t{kv_head} * geometry.group());
    return q.subspan(row * d, group * d);  // [G, d]
  }
  QuerySet set(std::uint32_t heads) const {
    return {.sequence = block->sequence,
            .kv_head = kv_head,
            .heads = heads,
            .token_begin = static_cast<std::int32_t>(token),
            .token_end = static_cast<std::int32_t>(token + 1)};
  }
};

class PerTokenSelector : public Selector {
 public:
  explicit PerTokenSelector(const LayerGeometry& geometry);
  void select(std::span<const QueryBlock> blocks, Selection& out) override;
  /// False, and nothing happens, where the method cannot.
  bool divide(const KeyShare& share);
  const KeyShare& share() const { return share_; }

 protected:
  /// Whether the method chooses over ranks as the top of this file says.
  virtual bool divides() const { return false; }
  /// Adds the sets of one unit, which cover every head of its group. Units run side by side, each worker one
  /// at a time.
  virtual void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) = 0;

  int workers() const;
  /// body(item, worker) over the pool, or one after the other without one.
  void for_each(std::int64_t items, const std::function<void(std::int64_t, int)>& body) const;

  /// Where the far keys of all ranks begin.
  std::int64_t sink() const { return share_.divided() ? sink_ : geometry_.dense.sink; }
  /// The rows of the last set of the unit's choice are this rank's best by the rule: those stay that are by the best
  /// of all ranks. `scores` of the rows, in their order.
  void rank_rows(const SelectUnit& unit, const RankRule& rule, std::span<const Position> rows,
                 std::span<const float> scores);

  /// Of a selector that has a share of the keys: its sink ends where that begins.
  LayerGeometry geometry_;

 private:
  /// A set of a unit's choice whose keys compete with those of other ranks.
  struct RankedSet {
    std::size_t set = 0;
    RankRule rule;
    RankedKeys keys;
  };
  void add_units(const QueryBlock& block);
  void choose_units(std::size_t begin, std::size_t end);
  void keep_best(std::size_t begin, std::size_t end);

  KeyShare share_;
  std::int64_t sink_ = 0;  // of all keys
  std::vector<SelectUnit> units_;
  std::vector<Selection> chosen_;               // [units]
  std::vector<SelectWork> unit_work_;           // [units]
  std::vector<std::vector<RankedSet>> ranked_;  // [units]
};

}  // namespace lode
