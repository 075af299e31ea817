// SPDX-License-Identifier: Apache-2.0
// Best-first walk over a graph of keys towards those with the largest inner product with a query.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ann/graph/key_graph.h"
#include "ann/graph/quantized_keys.h"
#include "kernels/select/int8_dot.h"

namespace lode {

/// One walk at a time; keeps its memory from walk to walk. The best nodes found so far are held in order. The
/// best `beam` of them are expanded (their links are looked at), a few at a time, until all are; more nodes
/// than are expanded may be kept, since what lies beside the way is found for the price of its score.
///
/// A walk waits for memory most of its time, so it goes in turns that each end by asking for what the next
/// one needs. Several walks on one thread take turns (run_together): while one waits, the others work.
class BeamSearch {
 public:
  /// Nodes expanded in one turn: their links' keys come from memory at the same time, and what is found is
  /// merged once. More would go ahead of what the best of them find.
  static constexpr std::size_t kExpandTogether = 4;

  /// Starts anew. The arguments but q outlive the walk; `keep` bounds what is found. Only a walk that
  /// `may_widen` remembers what it drops.
  void begin(const KeyGraph& graph, const BeamKeys& keys, const float* q /*[d]*/, std::int64_t keep,
             bool may_widen = false);
  /// Looks at these nodes as well, each once however often it is named.
  void visit(std::span<const Node> nodes);
  /// Goes on until the best `beam` (at most `keep`) nodes found are expanded.
  void run(std::int64_t beam);
  /// One turn of run(); false when nothing is left to do.
  bool turn(std::int64_t beam);
  /// Keeps more than before: nodes that had been dropped return.
  void widen(std::int64_t keep);

  /// The nodes found, best first; equal scores: the larger node first.
  std::int64_t found() const { return std::ssize(best_); }
  Node node(std::int64_t rank) const { return node_of(best_[static_cast<std::size_t>(rank)]); }

  std::int64_t scored() const { return scored_; }      ///< nodes looked at since begin
  std::int64_t expanded() const { return expanded_; }  ///< nodes whose links were read since begin

  BeamSearch() = default;
  ~BeamSearch() = default;
  BeamSearch(const BeamSearch&) = delete;
  BeamSearch& operator=(const BeamSearch&) = delete;
  BeamSearch(BeamSearch&&) = default;
  BeamSearch& operator=(BeamSearch&&) = default;

 private:
  /// One number per node found: [order of the score | node | 1 while it is not expanded].
  using Entry = std::uint64_t;
  static Node node_of(Entry entry) { return static_cast<Node>(static_cast<std::uint32_t>(entry) >> 1); }

  Node* collect(Node node, Node* end);
  void score_collected();
  void sort_fresh();
  void merge();
  void choose(std::int64_t beam);

  const KeyGraph* graph_ = nullptr;
  BeamKeys keys_;
  CodedQuery q_;
  std::size_t keep_ = 0;
  bool may_widen_ = false;
  std::size_t first_pending_ = 0;  // entries before are expanded
  std::int64_t scored_ = 0, expanded_ = 0;
  std::vector<Entry> best_, fresh_, sorted_;  // falling; in any order; falling
  std::vector<Entry> dropped_;
  std::vector<std::uint64_t> visited_;  // a bit per node
  std::vector<Node> seen_;    // whose bits are set: those scored, then those whose keys are on their way
  std::vector<Node> chosen_;  // to be expanded in the next turn: their links are on their way
  std::vector<std::int32_t> rank_;  // [fresh] among themselves, then among the best
  std::vector<float> scores_;
};

/// run(beam) of all, turn by turn. Each finds what it would find alone.
void run_together(std::span<BeamSearch> walks, std::int64_t beam);

}  // namespace lode
