// SPDX-License-Identifier: Apache-2.0
#include "attend/keys.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

namespace {

bool is_rising(std::span<const Position> rows) {
  bool rising = true;
  for (std::size_t i = 1; i < rows.size(); ++i) rising &= rows[i - 1] < rows[i];
  return rising;
}

/// Whether rising rows hold a piece of so many neighbours.
bool has_run(std::span<const Position> rows, Position length) {
  const auto reach = static_cast<std::size_t>(length - 1);
  bool found = false;
  for (std::size_t i = 0; i + reach < rows.size(); ++i) found |= rows[i + reach] - rows[i] == length - 1;
  return found;
}

}  // namespace

void FarKeys::assign(const Selection::Set& set, Position far_begin, Position far_end) {
  plain = {};
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
  // What most selectors give, tens of thousands of rows, is taken as it is.
  if (!weighted && !set.rows.empty() && (set.runs.empty() || set.rows.back() < set.runs.front().begin)) {
    LODE_ASSERT(set.rows.front() >= far_begin && set.rows.back() < far_end && is_rising(set.rows));
    plain = set.rows;
    last = plain.back() + 1;
    while (next_run < set.runs.size()) take(set.runs[next_run++]);
    return;
  }
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
  const auto below = [end](const auto& rising) {
    return std::lower_bound(rising.begin(), rising.end(), end) - rising.begin();
  };
  std::int64_t count = below(rows) + below(plain);
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
  const auto first = std::lower_bound(far.plain.begin(), far.plain.end(), begin);
  add_rows({first, std::lower_bound(first, far.plain.end(), end)});
  for (const Run& run : far.runs) add({std::max(run.begin, begin), std::min(run.end, end)});
  for (std::size_t i = 0; i < far.rows.size(); ++i) {
    if (far.rows[i] < begin || far.rows[i] >= end) continue;
    log_weights_.resize(rows_.size(), 0.0f);
    rows_.push_back(far.rows[i]);
    log_weights_.push_back(far.log_weights[i]);
    weighted_ = true;
  }
}

void KeyList::add_rows(std::span<const Position> rows) {
  rows_.reserve(rows_.size() + rows.size() + kMinRun);
  if (!rows.empty() && !(open_.begin < open_.end && open_.end == rows[0]) && !has_run(rows, kMinRun)) {
    flush();
    std::size_t last = rows.size() - 1;  // where the piece begins that what follows may continue
    while (last > 0 && rows[last - 1] + 1 == rows[last]) --last;
    rows_.insert(rows_.end(), rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(last));
    open_ = {rows[last], rows.back() + 1};
    return;
  }
  for (std::size_t i = 0; i < rows.size();) {
    if (open_.begin < open_.end && open_.end == rows[i]) {
      ++open_.end, ++i;
      continue;
    }
    flush();
    std::size_t last = i;  // rows [i, last) stand alone
    while (last + 1 < rows.size() && rows[last + 1] != rows[last] + 1) ++last;
    rows_.insert(rows_.end(), rows.begin() + static_cast<std::ptrdiff_t>(i),
                 rows.begin() + static_cast<std::ptrdiff_t>(last));
    open_ = {rows[last], rows[last] + 1};
    i = last + 1;
  }
}

void KeyList::flush() {
  if (open_.end - open_.begin >= kMinRun) {
    runs_.push_back(open_);
  } else {
    for (Position row = open_.begin; row < open_.end; ++row) rows_.push_back(row);
  }
  open_ = {};
}

void KeyList::finish() {
  flush();
  if (weighted_) log_weights_.resize(rows_.size(), 0.0f);
}

KeyList KeyList::split(Position seam) {
  KeyList behind;
  for (Run& run : runs_) {
    if (run.end <= seam) continue;
    behind.runs_.push_back({std::max(run.begin, seam) - seam, run.end - seam});
    run.end = seam;
  }
  std::erase_if(runs_, [seam](const Run& run) { return run.begin >= seam; });
  std::size_t kept = rows_.size();  // the window comes last
  while (kept > 0 && rows_[kept - 1] >= seam) --kept;
  for (std::size_t i = kept; i < rows_.size(); ++i) behind.rows_.push_back(rows_[i] - seam);
  rows_.resize(kept);
  if (weighted_) log_weights_.resize(kept);
  return behind;
}

}  // namespace lode
