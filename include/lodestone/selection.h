// SPDX-License-Identifier: Apache-2.0
// What a retrieval method returns, and all that attention needs to know of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// Consecutive positions [begin, end).
struct Run {
  Position begin = 0, end = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

/// Queries that share one choice of keys: some heads of one group times some consecutive query tokens of one
/// sequence.
struct QuerySet {
  std::int32_t sequence = 0;  ///< the QueryBlock's own; no two blocks of a call share one
  std::int32_t kv_head = 0;
  std::uint32_t heads = 0;                      ///< bit g set: query head kv_head * G + g takes part
  std::int32_t token_begin = 0, token_end = 0;  ///< query tokens of the block, [begin, end)
};

/// Every head of a group of G.
constexpr std::uint32_t all_heads(int group) {
  return group >= 32 ? ~0u : (1u << group) - 1u;
}

/// The far keys chosen for each query set. Far keys only: sink and window are attended anyway, and a key is
/// in exactly one of sink, window, index. A set of several tokens lists far keys of its last one; each token
/// attends those that are far for itself (the others are in its window). Built set by set: add_set, then its
/// runs and rows; both may be mixed.
class Selection {
 public:
  struct Set {
    QuerySet queries;
    std::span<const Run> runs;       ///< disjoint, rising
    std::span<const Position> rows;  ///< disjoint from the runs, rising, unique
    std::span<const float>
        log_weights;  ///< one per row, added to its score (sampling methods); empty = all 0
    /// Estimate of what was skipped, merged like any other state (methods with a tail); empty = none.
    std::span<const float> tail_output;  ///< [queries, d], queries = tokens x heads, token-major
    std::span<const float> tail_lse;     ///< [queries]
  };

  void clear();
  void add_set(const QuerySet& queries);
  void add_run(Position begin, Position end);                                ///< to the last set
  void add_row(Position row, float log_weight = 0.0f);                       ///< to the last set
  void add_rows(std::span<const Position> rows);                             ///< to the last set, weights 0
  void set_tail(std::span<const float> output, std::span<const float> lse);  ///< of the last set

  std::int64_t sets() const { return static_cast<std::int64_t>(ends_.size()); }
  Set set(std::int64_t index) const;
  std::int64_t keys(std::int64_t index) const;  ///< far keys chosen by one set
  /// For methods that find keys out of order: sorts the last set's rows (weights follow).
  void sort_rows();
  /// All sets of the other, after these. With `kv_heads`, the other's head h is kv_heads[h] here.
  void append(const Selection& other, std::span<const int> kv_heads = {});

 private:
  struct End {
    QuerySet queries;
    std::size_t runs = 0, rows = 0, tail_output = 0, tail_lse = 0;  // one past the set's last
    bool weighted = false;
  };
  std::vector<End> ends_;
  std::vector<Run> runs_;
  std::vector<Position> rows_;
  std::vector<float> log_weights_;  // parallel to rows_
  std::vector<float> tail_output_, tail_lse_;
};

}  // namespace lode
