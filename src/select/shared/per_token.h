// SPDX-License-Identifier: Apache-2.0
// Base of methods whose query tokens choose one by one: what a token attends then depends neither on how its
// question was cut into chunks nor on what else is in the batch.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lodestone/selector.h"

namespace lode {

/// One query token and KV head whose far part is not empty.
struct SelectUnit {
  const QueryBlock* block = nullptr;
  std::int64_t token = 0;  ///< in the block
  int kv_head = 0;
  Position far_begin = 0, far_end = 0;

  Position position() const { return block->begin + static_cast<Position>(token); }
  const KvRows& kv() const { return block->kv.heads[static_cast<std::size_t>(kv_head)]; }
  std::int64_t far_keys() const { return std::int64_t{far_end} - far_begin; }
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

 protected:
  /// Adds the sets of one unit, which cover every head of its group. Units run side by side, each worker one
  /// at a time.
  virtual void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) = 0;

  int workers() const;
  /// body(item, worker) over the pool, or one after the other without one.
  void for_each(std::int64_t items, const std::function<void(std::int64_t, int)>& body) const;

  const LayerGeometry geometry_;

 private:
  std::vector<SelectUnit> units_;
  std::vector<Selection> chosen_;      // [units]
  std::vector<SelectWork> unit_work_;  // [units]
};

}  // namespace lode
