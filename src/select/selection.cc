// SPDX-License-Identifier: Apache-2.0
#include "lodestone/selection.h"

#include <algorithm>
#include <numeric>

#include "lodestone/error.h"

namespace lode {

void Selection::clear() {
  ends_.clear();
  runs_.clear();
  rows_.clear();
  log_weights_.clear();
  tail_output_.clear();
  tail_lse_.clear();
}

void Selection::add_set(const QuerySet& queries) {
  LODE_ASSERT(queries.heads != 0 && queries.token_begin < queries.token_end);
  ends_.push_back({.queries = queries,
                   .runs = runs_.size(),
                   .rows = rows_.size(),
                   .tail_output = tail_output_.size(),
                   .tail_lse = tail_lse_.size(),
                   .weighted = false});
}

void Selection::add_run(Position begin, Position end) {
  if (begin >= end) return;
  runs_.push_back({begin, end});
  ends_.back().runs = runs_.size();
}

void Selection::add_row(Position row, float log_weight) {
  rows_.push_back(row);
  ends_.back().rows = rows_.size();
  ends_.back().weighted = ends_.back().weighted || log_weight != 0.0f;
  if (!ends_.back().weighted) return;
  log_weights_.resize(rows_.size(), 0.0f);
  log_weights_.back() = log_weight;
}

void Selection::add_rows(std::span<const Position> rows) {
  rows_.insert(rows_.end(), rows.begin(), rows.end());
  ends_.back().rows = rows_.size();
  if (ends_.back().weighted) log_weights_.resize(rows_.size(), 0.0f);
}

void Selection::set_tail(std::span<const float> output, std::span<const float> lse) {
  End& last = ends_.back();
  tail_output_.resize(ends_.size() > 1 ? ends_[ends_.size() - 2].tail_output : 0);
  tail_lse_.resize(ends_.size() > 1 ? ends_[ends_.size() - 2].tail_lse : 0);
  tail_output_.insert(tail_output_.end(), output.begin(), output.end());
  tail_lse_.insert(tail_lse_.end(), lse.begin(), lse.end());
  last.tail_output = tail_output_.size();
  last.tail_lse = tail_lse_.size();
}

Selection::Set Selection::set(std::int64_t index) const {
  const End& end = ends_[static_cast<std::size_t>(index)];
  const End begin = index > 0 ? ends_[static_cast<std::size_t>(index - 1)] : End{};
  const auto part = []<class T>(const std::vector<T>& all, std::size_t from, std::size_t to) {
    return std::span<const T>(all).subspan(from, to - from);
  };
  return {.queries = end.queries,
          .runs = part(runs_, begin.runs, end.runs),
          .rows = part(rows_, begin.rows, end.rows),
          .log_weights = end.weighted ? part(log_weights_, begin.rows, end.rows) : std::span<const float>{},
          .tail_output = part(tail_output_, begin.tail_output, end.tail_output),
          .tail_lse = part(tail_lse_, begin.tail_lse, end.tail_lse)};
}

std::int64_t Selection::keys(std::int64_t index) const {
  const Set s = set(index);
  std::int64_t keys = std::ssize(s.rows);
  for (const Run& run : s.runs) keys += run.end - run.begin;
  return keys;
}

void Selection::sort_rows() {
  const std::size_t begin = ends_.size() > 1 ? ends_[ends_.size() - 2].rows : 0;
  const std::vector<Position> rows(rows_.begin() + static_cast<std::ptrdiff_t>(begin), rows_.end());
  if (!ends_.back().weighted)
    return std::sort(rows_.begin() + static_cast<std::ptrdiff_t>(begin), rows_.end());
  const std::vector<float> weights(log_weights_.begin() + static_cast<std::ptrdiff_t>(begin),
                                   log_weights_.end());
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rows[a] < rows[b]; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    rows_[begin + i] = rows[order[i]];
    log_weights_[begin + i] = weights[order[i]];
  }
}

void Selection::append(const Selection& other, std::span<const int> kv_heads) {
  const End shift = {.queries = {},
                     .runs = runs_.size(),
                     .rows = rows_.size(),
                     .tail_output = tail_output_.size(),
                     .tail_lse = tail_lse_.size(),
                     .weighted = false};
  for (End end : other.ends_) {
    end.runs += shift.runs;
    end.rows += shift.rows;
    end.tail_output += shift.tail_output;
    end.tail_lse += shift.tail_lse;
    if (!kv_heads.empty()) end.queries.kv_head = kv_heads[static_cast<std::size_t>(end.queries.kv_head)];
    ends_.push_back(end);
  }
  runs_.insert(runs_.end(), other.runs_.begin(), other.runs_.end());
  rows_.insert(rows_.end(), other.rows_.begin(), other.rows_.end());
  if (!other.log_weights_.empty()) {
    log_weights_.resize(shift.rows, 0.0f);  // before this point those of weighted sets alone are kept
    log_weights_.insert(log_weights_.end(), other.log_weights_.begin(), other.log_weights_.end());
  }
  tail_output_.insert(tail_output_.end(), other.tail_output_.begin(), other.tail_output_.end());
  tail_lse_.insert(tail_lse_.end(), other.tail_lse_.begin(), other.tail_lse_.end());
}

}  // namespace lode
