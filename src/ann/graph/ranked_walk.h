// SPDX-License-Identifier: Apache-2.0
// BeamSearch for wide beams: it finds the same nodes in a fraction of the time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ann/graph/key_graph.h"
#include "ann/graph/quantized_keys.h"

namespace lode {

/// A wide BeamSearch scores a large part of the keys, each at a random place, and moves a long list for each one that
/// it keeps. Here all keys are scored in the order in which they lie, and sorted once. A walk then only notes which
/// ranks its links have led to, one bit each.
class RankedWalk {
 public:
  /// Ranks all keys for this query, and starts anew. The graph outlives the walk.
  void begin(const KeyGraph& graph, const BeamKeys& keys, const float* q /*[d]*/);
  /// Goes on until the best `beam` nodes found are expanded; at first from the graph's entries. Beams rise from call to
  /// call.
  void run(std::int64_t beam);
  /// How many of the nodes are among the best `count` found.
  std::int64_t found_of(std::span<const Node> nodes, std::int64_t count) const;

 private:
  using Bits = std::vector<std::uint64_t>;  // one a rank

  void rank(const BeamKeys& keys, const float* q);
  void find(Node node);
  bool expand();
  void prefetch_next() const;
  void take_fresh();
  Node node_at(std::int64_t rank) const {
    return static_cast<Node>(~static_cast<std::uint32_t>(order_[static_cast<std::size_t>(rank)]));
  }
  static std::int64_t first_of(const Bits& bits, std::int64_t begin, std::int64_t end);
  static std::int64_t last_before(const Bits& bits, std::int64_t end);

  const KeyGraph* graph_ = nullptr;
  std::vector<std::uint64_t> order_, spare_;  // [nodes] by rank: the inverse of [order of the score | node]
  std::vector<std::int32_t> rank_;            // [nodes] 0 is the best
  Bits found_, pending_;                      // pending: found but not expanded
  std::vector<std::int32_t> fresh_;           // ranks found in this turn, and room for one more
  std::size_t fresh_count_ = 0;
  std::int64_t beam_ = 0;
  std::int64_t end_ = 0, inside_ = 0;  // the best `beam_` found have ranks below end_; so many there are
  std::int64_t first_pending_ = 0;     // no rank below is pending
};

}  // namespace lode
