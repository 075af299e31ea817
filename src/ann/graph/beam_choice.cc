// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/beam_choice.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "ann/graph/beam_search.h"
#include "base/cancel.h"
#include "base/threads.h"

namespace lode {

namespace {

constexpr std::int64_t kLeastBeam = 16;
constexpr std::int64_t kSteps = 8;   // beams tried between one and twice it
constexpr std::int64_t kRanked = 2;  // found keys that count, for each wanted one

/// Which share of a query's wanted keys its walk finds with each of kSteps beams.
using Shares = std::array<double, kSteps>;

std::int64_t beam_of(std::int64_t from, std::int64_t step) {
  return from + from * step / kSteps;
}

/// Of one walk that goes on from each beam to the next.
Shares shares_of(BeamSearch& walk, const KeyGraph& graph, const BeamKeys& keys, const float* q,
                 std::span<const Node> wanted /*rising*/, std::int64_t from) {
  const std::int64_t counted = kRanked * std::ssize(wanted);
  walk.begin(graph, keys, q, std::max(2 * from, counted));
  walk.visit(graph.entries());
  Shares shares{};
  for (std::int64_t step = 0; step < kSteps; ++step) {
    walk.run(beam_of(from, step));
    std::int64_t hits = 0;
    for (std::int64_t rank = 0; rank < std::min(counted, walk.found()); ++rank)
      hits += std::binary_search(wanted.begin(), wanted.end(), walk.node(rank)) ? 1 : 0;
    shares[static_cast<std::size_t>(step)] =
        static_cast<double>(hits) / static_cast<double>(std::ssize(wanted));
  }
  return shares;
}

/// The average of what all queries find with one of the beams, less its standard error.
double surely_found(const std::vector<Shares>& of_queries, std::int64_t step) {
  const auto count = static_cast<double>(of_queries.size());
  double sum = 0.0, squares = 0.0;
  for (const Shares& shares : of_queries) {
    const double share = shares[static_cast<std::size_t>(step)];
    sum += share;
    squares += share * share;
  }
  const double mean = sum / count, variance = std::max(0.0, squares / count - mean * mean);
  return mean - std::sqrt(variance / count);
}

}  // namespace

std::int64_t choose_beam(const KeyGraph& graph, const Wanted& wanted, double recall, std::int64_t most,
                         const BeamKeys& keys, ThreadPool& pool) {
  const std::int64_t count = wanted.queries.rows;
  if (count == 0 || wanted.nearest.empty()) return most;
  const std::int64_t each = std::ssize(wanted.nearest) / count;
  std::vector<Node> lists(wanted.nearest.begin(), wanted.nearest.end());  // [count, each] rising
  const auto list = [&](std::int64_t q) {
    return std::span(lists).subspan(static_cast<std::size_t>(q * each), static_cast<std::size_t>(each));
  };
  for (std::int64_t q = 0; q < count; ++q) std::sort(list(q).begin(), list(q).end());
  std::vector<BeamSearch> walks(static_cast<std::size_t>(pool.size()));
  std::vector<Shares> shares(static_cast<std::size_t>(count));
  for (std::int64_t from = kLeastBeam; from < most; from *= 2) {
    pool.for_each(count, [&](std::int64_t q, int worker) {
      check_cancel();
      shares[static_cast<std::size_t>(q)] = shares_of(walks[static_cast<std::size_t>(worker)], graph, keys,
                                                      wanted.queries[q].data(), list(q), from);
    });
    for (std::int64_t step = 0; step < kSteps; ++step)
      if (surely_found(shares, step) >= recall) return std::min(most, beam_of(from, step));
  }
  return most;
}

}  // namespace lode
