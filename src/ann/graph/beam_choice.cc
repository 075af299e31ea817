// SPDX-License-Identifier: Apache-2.0
// Beams are tried by octaves, narrow ones first; within one, a query's walk goes on from beam to beam. An octave ends as
// soon as none of its beams can reach the recall, whatever the queries to come find: far from it a few of them tell.
#include "ann/graph/beam_choice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "ann/graph/beam_search.h"
#include "ann/graph/ranked_walk.h"
#include "base/cancel.h"
#include "base/threads.h"

namespace lode {

namespace {

constexpr std::int64_t kLeastBeam = 16;
constexpr std::int64_t kSteps = 8;   // beams tried between one and twice it
constexpr std::int64_t kRanked = 2;  // found keys that count, for each wanted one
// Beams from this share of the keys on are tried by RankedWalk. Measured at 30,000 and 120,000 keys.
constexpr std::int64_t kKeysPerWideBeam = 64;

/// How many of a query's wanted keys its walk finds with each beam of an octave.
using Hits = std::array<std::int64_t, kSteps>;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// kSteps beams from one to below twice it, those below `most`, and what queries find with them.
class Octave {
 public:
  Octave(std::int64_t from, std::int64_t most, std::int64_t queries, std::int64_t each, double recall)
      : from_(from), to_come_(queries), queries_(queries), each_(each), recall_(recall) {
    while (steps_ < kSteps && beam(steps_) < most) ++steps_;
    is_hopeless_ = first_that_may_reach() == steps_;
  }

  std::int64_t steps() const { return steps_; }
  std::int64_t beam(std::int64_t step) const { return from_ + from_ * step / kSteps; }

  /// Of one more query. By any thread.
  void note(const Hits& hits) {
    const std::lock_guard lock(mutex_);
    --to_come_;
    for (std::size_t step = 0; step < hits.size(); ++step) {
      sums_[step] += hits[step];
      squares_[step] += hits[step] * hits[step];
    }
    is_hopeless_ = first_that_may_reach() == steps_;
  }
  /// Whether no beam reaches the recall, whatever the queries to come find.
  bool is_hopeless() const { return is_hopeless_; }
  /// The narrowest beam that does, when no query is to come.
  std::int64_t reaching() const { return beam(first_that_may_reach()); }

 private:
  std::int64_t first_that_may_reach() const {
    std::int64_t step = 0;
    while (step < steps_ && surely_found(at(step)) < recall_) ++step;
    return step;
  }
  /// The average share that queries find, less its standard error: at most, for those to come are taken to find all.
  /// No other share of one of them would give more, since none is further from an average than the root of their number
  /// times their deviation.
  double surely_found(std::size_t step) const {
    const auto count = static_cast<double>(queries_), each = static_cast<double>(each_);
    const double sum = static_cast<double>(sums_[step] + to_come_ * each_) / each;
    const double squares = static_cast<double>(squares_[step] + to_come_ * each_ * each_) / (each * each);
    const double mean = sum / count, variance = std::max(0.0, squares / count - mean * mean);
    return mean - std::sqrt(variance / count);
  }

  std::int64_t from_, steps_ = 0, to_come_, queries_, each_;
  double recall_;
  std::mutex mutex_;
  std::atomic<bool> is_hopeless_ = false;
  std::array<std::int64_t, kSteps> sums_{}, squares_{};  // of hits, and of their squares
};

/// What a thread walks with.
class Walker {
 public:
  Walker(const KeyGraph& graph, const BeamKeys& keys) : graph_(graph), keys_(keys) {}

  Hits hits(const float* q, std::span<const Node> wanted /*rising*/, const Octave& octave) {
    return octave.beam(0) * kKeysPerWideBeam < graph_.nodes() ? by_search(q, wanted, octave)
                                                              : by_ranks(q, wanted, octave);
  }

 private:
  Hits by_search(const float* q, std::span<const Node> wanted, const Octave& octave) {
    const std::int64_t counted = kRanked * std::ssize(wanted);
    search_.begin(graph_, keys_, q, std::max(2 * octave.beam(0), counted));
    search_.visit(graph_.entries());
    Hits hits{};
    for (std::int64_t step = 0; step < octave.steps(); ++step) {
      search_.run(octave.beam(step));
      for (std::int64_t rank = 0; rank < std::min(counted, search_.found()); ++rank)
        hits[at(step)] += std::binary_search(wanted.begin(), wanted.end(), search_.node(rank)) ? 1 : 0;
    }
    return hits;
  }
  Hits by_ranks(const float* q, std::span<const Node> wanted, const Octave& octave) {
    ranked_.begin(graph_, keys_, q);
    Hits hits{};
    for (std::int64_t step = 0; step < octave.steps(); ++step) {
      ranked_.run(octave.beam(step));
      hits[at(step)] = ranked_.found_of(wanted, kRanked * std::ssize(wanted));
    }
    return hits;
  }

  const KeyGraph& graph_;
  const BeamKeys keys_;
  BeamSearch search_;
  RankedWalk ranked_;
};

}  // namespace

std::int64_t choose_beam(const KeyGraph& graph, const Wanted& wanted, double recall, std::int64_t most,
                         const BeamKeys& keys, ThreadPool& pool) {
  const std::int64_t count = wanted.queries.rows, each = wanted.each();
  if (each == 0) return most;
  std::vector<Node> lists(wanted.nearest.begin(), wanted.nearest.end());  // [count, each] rising
  const auto list = [&](std::int64_t q) { return std::span(lists).subspan(at(q * each), at(each)); };
  for (std::int64_t q = 0; q < count; ++q) std::sort(list(q).begin(), list(q).end());
  std::vector<Walker> walkers;
  for (int worker = 0; worker < pool.size(); ++worker) walkers.emplace_back(graph, keys);
  for (std::int64_t from = kLeastBeam; from < most; from *= 2) {
    Octave octave(from, most, count, each, recall);
    pool.for_each(count, [&](std::int64_t q, int worker) {
      check_cancel();
      if (octave.is_hopeless()) return;
      octave.note(walkers[at(worker)].hits(wanted.queries[q].data(), list(q), octave));
    });
    if (!octave.is_hopeless()) return octave.reaching();
  }
  return most;
}

}  // namespace lode
