// SPDX-License-Identifier: Apache-2.0
#include "attend/keys.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

void FarKeys::assign(const Selection::Set& set, Position far_begin, Position far_end) {
  runs.clear();
  rows.clear();
  log_weights.clear();
  Position last = far_begin;  // keys below it are taken
  const auto take = [&](Run run) {
    LODE_ASSERT(run.begin >= last && run.end <= far_end);
    last = run.end;
    if (!runs.empty() && runs.back().end == run.begin) {
      runs.back().end = run.end;
    } else {
      runs.push_back(run);
    }
  };
  const bool weighted = !set.log_weights.empty();
  std::size_t next_run = 0;
  for (std::size_t i = 0; i < set.rows.size(); ++i) {
    const Position row = set.rows[i];
    while (next_run < set.runs.size() && set.runs[next_run].begin < row) take(set.runs[next_run++]);
    if (!weighted || set.log_weights[i] == 0.0f) {
      take({row, row + 1});
    } else {
      LODE_ASSERT(row >= last && row < far_end);
      last = row + 1;
      rows.push_back(row);
      log_weights.push_back(set.log_weights[i]);
    }
  }
  while (next_run < set.runs.size()) take(set.runs[next_run++]);
}

std::int64_t FarKeys::count_below(Position end) const {
  std::int64_t count = std::lower_bound(rows.begin(), rows.end(), end) - rows.begin();
  for (const Run& run : runs) {
    if (run.begin >= end) break;
    count += std::min(run.end, end) - run.begin;
  }
  return count;
}

void KeyList::add(Run run) {
  if (run.begin >= run.end) return;
  if (open_.end == run.begin && open_.begin < open_.end) {
    open_.end = run.end;
    return;
  }
  flush();
  open_ = run;
}

void KeyList::add(const FarKeys& far, Position begin, Position end) {
  for (const Run& run : far.runs) add({std::max(run.begin, begin), std::min(run.end, end)});
  for (std::size_t i = 0; i < far.rows.size(); ++i) {
    if (far.rows[i] < begin || far.rows[i] >= end) continue;
    rows_.push_back(far.rows[i]);
    log_weights_.push_back(far.log_weights[i]);
    weighted_ = true;
  }
}

void KeyList::flush() {
  if (open_.end - open_.begin >= kMinRun) {
    runs_.push_back(open_);
  } else {
    for (Position row = open_.begin; row < open_.end; ++row) {
      rows_.push_back(row);
      log_weights_.push_back(0.0f);
    }
  }
  open_ = {};
}

void KeyList::finish() {
  flush();
}

}  // namespace lode
