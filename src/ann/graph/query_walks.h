// SPDX-License-Identifier: Apache-2.0
// Walks over a graph for many queries whose best keys are known: what tells which links are worth their place.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ann/graph/key_graph.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// Queries as walks see them, and the best keys of each.
struct Wanted {
  Matrix<const float> queries;    // [q, m]
  std::span<const Node> nearest;  // [q, each]; empty where watch, found and offers are not used
  std::int64_t each() const { return queries.rows > 0 ? std::ssize(nearest) / queries.rows : 0; }
};

/// A key that a walk did not find though its query wants it.
struct MissedKey {
  std::int32_t query = 0, rank = 0;  ///< among its wanted keys
};

class QueryWalks {
 public:
  static constexpr std::int64_t kKeep = 160;       ///< best nodes that a walk keeps
  static constexpr std::int64_t kMostBeam = 150;   ///< of them it expands
  static constexpr std::int64_t kMostWanted = 64;  ///< of a query: a bit each
  static constexpr std::size_t kOffers = 6;

  virtual ~QueryWalks() = default;
  /// The graph that walks go through from here on; outlives them.
  virtual void enter(const KeyGraph& graph) = 0;
  /// How often nodes are among a walk's best `beam`, [nodes], and from there by which links a wanted key is found,
  /// [nodes, degree].
  virtual void watch(std::int64_t beam, std::vector<std::uint32_t>& visits,
                     std::vector<std::uint32_t>& uses) = 0;
  /// Which wanted keys each walk keeps: [q], the bit of each one's rank.
  virtual std::vector<std::uint64_t> found(std::int64_t beam) = 0;
  /// The best `keep` nodes of each walk that keeps as many, best first; -1 behind the last. [q, keep]
  virtual std::vector<Node> best(std::int64_t beam, std::int64_t keep) = 0;
  /// Of the wanted keys that the same query's walk found the kOffers nearest to each missed one, nearest first; -1
  /// behind the last. [missed, kOffers]
  virtual std::vector<Node> offers(std::span<const std::uint64_t> found,
                                   std::span<const MissedKey> missed) = 0;
};

/// On the host's cores. What is given outlives it. Polls check_cancel.
std::unique_ptr<QueryWalks> host_walks(const Wanted& of, const BeamKeys& keys, ThreadPool& pool);

}  // namespace lode
