// SPDX-License-Identifier: Apache-2.0
// Lists of keys in the form that the kernels like best: long runs as runs, everything else as rows.
#pragma once

#include <span>
#include <vector>

#include "lodestone/selection.h"

namespace lode {

/// The far keys of one query set: plain keys, and the rows that carry a log-weight.
struct FarKeys {
  std::span<const Position> plain;  // rising, below all runs: the set's own list, where it has that form
  std::vector<Run> runs;            // disjoint, rising, no two adjacent; single keys included
  std::vector<Position> rows;       // rising
  std::vector<float> log_weights;   // [rows]

  /// Takes over a set, which must outlive this; the keys must be rising, unique and in [far_begin, far_end),
  /// as selectors promise.
  void assign(const Selection::Set& set, Position far_begin, Position far_end);
  /// Keys below `end`.
  std::int64_t count_below(Position end) const;
  bool is_all(Position far_begin, Position far_end) const {
    return rows.empty() && (far_begin >= far_end || count_below(far_end) == far_end - far_begin);
  }
};

/// Collects keys in rising order, joins neighbours, and keeps joined pieces of kMinRun keys or more as runs.
class KeyList {
 public:
  /// Below it a gather costs no more than starting a run.
  static constexpr Position kMinRun = 16;

  void add(Run run);                                           ///< empty runs are allowed
  void add(const FarKeys& far, Position begin, Position end);  ///< those in [begin, end)
  void finish();
  /// After finish(): takes out the keys from `seam` on, counted from there. Only sink and window reach behind
  /// it, so no key that carries a weight does.
  KeyList split(Position seam);

  bool empty() const { return runs_.empty() && rows_.empty(); }
  std::span<const Run> runs() const { return runs_; }
  std::span<const Position> rows() const { return rows_; }
  std::span<const float> log_weights() const {
    return weighted_ ? std::span<const float>(log_weights_) : std::span<const float>{};
  }

 private:
  void add_rows(std::span<const Position> rows);  // rising, behind all before
  void flush();
  Run open_;  // not yet in runs_ or rows_
  std::vector<Run> runs_;
  std::vector<Position> rows_;
  std::vector<float> log_weights_;  // of the first rows; those of the others are 0
  bool weighted_ = false;
};

}  // namespace lode
