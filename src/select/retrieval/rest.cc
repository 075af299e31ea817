// SPDX-License-Identifier: Apache-2.0
#include "select/retrieval/rest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>

#include "base/cancel.h"
#include "base/relative_error.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "select/shared/best_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kLeastSample = 64;
constexpr int kRungs = 12;  // of thresholds, each half of the one before
// A sampled key stands for as many keys as there are for one of the sample. With this share of one key's weight as the
// highest threshold, a key just below it can move the sum by an eighth.
constexpr double kMostMoved = 0.125;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

float peak_of(std::span<const float> scores, float peak) {
  for (const float s : scores) peak = s > peak ? s : peak;  // a NaN stays out
  return peak;
}

double weight_of(std::span<const float> scores, float peak) {
  double sum = 0.0;
  for (const float s : scores) sum += weight_below(s, peak);
  return sum;
}

/// Log of what n keys weigh together, of which some are known and others sampled.
float log_weight_of_all(const ScoredKeys& found, const ScoredKeys& sample, std::int64_t n) {
  float peak = peak_of(found.scores, -std::numeric_limits<float>::infinity());
  peak = peak_of(sample.scores, peak);
  if (!std::isfinite(peak)) return peak;
  double unseen = 0.0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < sample.rows.size(); ++i) {
    if (std::binary_search(found.rows.begin(), found.rows.end(), sample.rows[i])) continue;
    unseen += weight_below(sample.scores[i], peak);
    ++count;
  }
  const auto left = static_cast<double>(n - std::ssize(found.rows));
  const double all =
      weight_of(found.scores, peak) + (count > 0 ? unseen * left / static_cast<double>(count) : 0.0);
  return peak + static_cast<float>(std::log(all));
}

/// The score that a key of `found` must reach.
float bar_for(const ScoredKeys& found, float bar, const ShareRule& rule) {
  const auto above =
      std::count_if(found.scores.begin(), found.scores.end(), [&](float s) { return s >= bar; });
  const std::int64_t wanted = std::clamp<std::int64_t>(above, rule.least, std::max(rule.least, rule.most));
  if (wanted == above || found.scores.empty()) return bar;
  if (wanted >= std::ssize(found.scores)) return -std::numeric_limits<float>::infinity();
  std::vector<float> order(found.scores);
  for (float& s : order) s = std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
  std::nth_element(order.begin(), order.begin() + std::max<std::int64_t>(0, wanted - 1), order.end(),
                   std::greater<>());
  return order[at(std::max<std::int64_t>(0, wanted - 1))];
}

/// One judging query, its output under full attention and under each threshold.
class Judged {
 public:
  Judged(const JudgingQuery& query, const KvRows& kv, const ShareGoal& goal)
      : query_(query),
        kv_(kv),
        goal_(goal),
        begin_(static_cast<Position>(goal.dense.sink)),
        end_(std::max(begin_, static_cast<Position>(query.position + 1 - goal.dense.window))) {
    const std::int64_t n = keys(), d = kv.d;
    q_.assign(query.q, query.q + d);
    for (float& x : q_) x *= goal.scale;
    all_.scores.resize(at(n));
    kernels().score_run(q_.data(), 1, kv, begin_, end_, all_.scores.data(), n);
    for (Position row = begin_; row < end_; ++row) all_.rows.push_back(row);
    draw_even(begin_, end_, sample_size(goal.rest, n),
              hash_seed(goal.seed, static_cast<std::uint64_t>(query.position)), sample_.rows);
    for (const Position row : sample_.rows) sample_.scores.push_back(all_.scores[at(row - begin_)]);
    if (begin_ > 0) near_.push_back({0, begin_});
    near_.push_back({end_, static_cast<Position>(query.position + 1)});
    whole_ = {{0, static_cast<Position>(query.position + 1)}};
    outputs_.resize(at((kRungs + 1) * d));
    lse_.resize(kRungs + 1);
  }

  std::int64_t keys() const { return std::max<std::int64_t>(0, end_ - begin_); }

  /// Items of full attention and of all thresholds: those choose from the far keys, the rest is near.
  void add_items(double highest, std::vector<AttendItem>& items) {
    items.push_back(item(0, whole_, {}, {}));
    for (int rung = 0; rung < kRungs; ++rung) {
      const auto floor = static_cast<float>(std::log(std::ldexp(highest, -rung)));
      chosen_.add_set({.heads = 1, .token_end = 1});
      choose_with_rest(all_, sample_, keys(), {floor, 0, keys()}, chosen_);
    }
    for (int rung = 0; rung < kRungs; ++rung) {
      const Selection::Set set = chosen_.set(rung);
      const std::int64_t sampled =
          std::count_if(set.log_weights.begin(), set.log_weights.end(), [](float w) { return w != 0.0f; });
      taken_[at(rung)] = std::ssize(set.rows) - sampled;
      if (rung > 0 && taken_[at(rung)] > 2 * goal_.most.of(keys())) break;  // nobody asks about lower ones
      items.push_back(item(rung + 1, near_, set.rows, set.log_weights));
      ++rungs_;
    }
  }
  int rungs() const { return rungs_; }
  double taken(int rung) const { return static_cast<double>(taken_[at(rung)]); }
  double error(int rung) const {
    const double e = relative_error(outputs_.data() + (rung + 1) * kv_.d, outputs_.data(), kv_.d);
    return std::isfinite(e) ? e : 0.0;  // keys that are not numbers
  }

 private:
  AttendItem item(int place, std::span<const Run> runs, std::span<const Position> rows,
                  std::span<const float> log_weights) {
    return {.q = query_.q,
            .queries = 1,
            .kv = kv_,
            .runs = runs,
            .rows = rows,
            .log_weights = log_weights,
            .o = outputs_.data() + place * kv_.d,
            .lse = &lse_[at(place)]};
  }

  JudgingQuery query_;
  const KvRows& kv_;
  const ShareGoal& goal_;
  Position begin_, end_;
  std::vector<float> q_;
  ScoredKeys all_, sample_;
  std::vector<Run> near_, whole_;
  Selection chosen_;
  std::array<std::int64_t, kRungs> taken_ = {};
  int rungs_ = 0;
  std::vector<float> outputs_, lse_;  // [1 + rungs, d], [1 + rungs]
};

}  // namespace

void draw_even(Position begin, Position end, std::int64_t count, std::uint64_t seed,
               std::vector<Position>& rows) {
  rows.clear();
  const std::int64_t n = std::max<std::int64_t>(0, end - begin);
  count = std::min(count, n);
  Rng rng(seed);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t low = i * n / count, high = (i + 1) * n / count;
    rows.push_back(static_cast<Position>(
        begin + low + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(high - low)))));
  }
}

std::int64_t sample_size(Amount rest, std::int64_t n) {
  return rest.is_share ? std::min(n, std::max(rest.of(n), kLeastSample)) : rest.of(n);
}

void choose_with_rest(const ScoredKeys& found, const ScoredKeys& sample, std::int64_t n,
                      const ShareRule& rule, Selection& out) {
  const float bar = bar_for(found, log_weight_of_all(found, sample, n) + rule.floor, rule);
  std::vector<Position> chosen;
  for (std::size_t i = 0; i < found.rows.size(); ++i)
    if (found.scores[i] >= bar && std::ssize(chosen) < std::max(rule.least, rule.most))
      chosen.push_back(found.rows[i]);
  // A search may have missed a key that the sample holds. Weighted it would count for a hundred.
  const auto walked = std::ssize(chosen);
  for (std::size_t i = 0; i < sample.rows.size(); ++i)
    if (sample.scores[i] >= bar && !std::binary_search(found.rows.begin(), found.rows.end(), sample.rows[i]))
      chosen.push_back(sample.rows[i]);
  std::inplace_merge(chosen.begin(), chosen.begin() + walked, chosen.end());
  add_with_rest(chosen, sample.rows, n, out);
}

void add_with_rest(std::span<const Position> chosen, std::span<const Position> sample, std::int64_t n,
                   Selection& out) {
  std::vector<Position> rest;
  std::set_difference(sample.begin(), sample.end(), chosen.begin(), chosen.end(), std::back_inserter(rest));
  const std::int64_t left = n - std::ssize(chosen);
  const float weight =
      rest.empty()
          ? 0.0f
          : static_cast<float>(std::log(static_cast<double>(left) / static_cast<double>(rest.size())));
  std::size_t c = 0;
  for (const Position row : rest) {
    for (; c < chosen.size() && chosen[c] < row; ++c) out.add_row(chosen[c]);
    out.add_row(row, weight);
  }
  out.add_rows(chosen.subspan(c));
}

HeadShare calibrate_share(std::span<const JudgingQuery> queries, const KvRows& kv, const ShareGoal& goal,
                          ThreadPool& pool) {
  std::vector<Judged> judged;
  judged.reserve(queries.size());  // items point into them
  std::int64_t keys = 0;
  for (const JudgingQuery& query : queries) {
    judged.emplace_back(query, kv, goal);
    if (judged.back().keys() == 0) judged.pop_back();
  }
  for (const Judged& one : judged) keys = std::max(keys, one.keys());
  const std::int64_t n = keys > 0 ? keys : std::max<std::int64_t>(1, kv.rows);
  const double highest = kMostMoved * static_cast<double>(sample_size(goal.rest, n)) / static_cast<double>(n);
  if (judged.empty())
    return {.floor = static_cast<float>(std::log(highest / 16)),
            .wanted = static_cast<double>(goal.most.of(n)) / (2.0 * static_cast<double>(n))};
  std::vector<AttendItem> items;
  for (Judged& one : judged) {
    check_cancel();
    one.add_items(highest, items);
  }
  attend_items(items, goal.scale, pool);
  HeadShare best = {.judged = true};
  const auto count = static_cast<double>(judged.size());
  for (int rung = 0; rung < kRungs; ++rung) {
    double taken = 0, error = 0;
    const bool all =
        std::all_of(judged.begin(), judged.end(), [&](const Judged& j) { return rung < j.rungs(); });
    if (!all) break;
    for (const Judged& one : judged) taken += one.taken(rung), error += one.error(rung);
    if (rung > 0 && taken / count > static_cast<double>(goal.most.of(n))) break;
    best.floor = static_cast<float>(std::log(std::ldexp(highest, -rung)));
    best.wanted = taken / count / static_cast<double>(n);
    best.error = error / count;
    if (best.error <= goal.error) break;
  }
  return best;
}

}  // namespace lode
