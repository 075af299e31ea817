// SPDX-License-Identifier: Apache-2.0
// A directed graph over the keys of one head, of bounded degree, in which every node can be reached from the
// entry whatever is added and taken away: among its links is a spanning tree, whose links are never replaced.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "ann/graph/quantized_keys.h"
#include "base/huge_pages.h"

namespace lode {

class ThreadPool;

using Node = std::int32_t;  ///< index of a key, from 0
/// A node; the highest bit is set when the link belongs to the spanning tree.
using Link = std::uint32_t;
inline constexpr Link kTreeLink = Link{1} << 31;
inline constexpr Link kNoLink = kTreeLink - 1;  ///< fills the row behind a node's last link
constexpr Node target_of(Link link) {
  return static_cast<Node>(link & ~kTreeLink);
}

class KeyGraph {
 public:
  static constexpr int kLeastDegree = 4;
  static constexpr std::size_t kEntries = 16;

  /// Without nodes. `degree` bounds the links of a node.
  explicit KeyGraph(int degree) : degree_(degree) {}
  /// Links as they are given (no tree yet; -1 behind a node's last), then connected. `entries` must not be
  /// empty when there are nodes.
  KeyGraph(int degree, std::span<const Node> rows /*[nodes, degree]*/, std::vector<Node> entries,
           const BeamKeys& keys, ThreadPool& pool);
  /// What rows() and entries() gave. InputError, which begins with `where`, unless every link is a node and
  /// the tree links reach each node once.
  static KeyGraph restore(int degree, std::span<const Link> rows, std::span<const Node> entries,
                          std::string_view where);

  int degree() const { return degree_; }
  std::int64_t nodes() const { return std::ssize(links_) / degree_; }
  std::span<const Link> rows() const { return links_; }  // [nodes, degree]
  const Link* row(Node node) const { return links_.data() + std::int64_t{node} * degree_; }
  std::span<const Link> links(Node node) const;
  /// Where walks begin; the first is the root of the tree.
  std::span<const Node> entries() const { return entries_; }

  /// How much queries want a node's key; only the order counts.
  using Worth = std::function<float(Node)>;
  /// Adds the next node, linked to some of `neighbours` (nearest first), from them and from `finders`. A
  /// full row gives up the link of least worth among those that pruning leaves out, which may be the new
  /// one. All keys and the new node's are in `keys`.
  void add(std::span<const Node> neighbours, std::span<const Node> finders, const BeamKeys& keys,
           const Worth& worth);
  /// Takes away the nodes from `nodes` (at least settled()) on, and with them all that add() did, to the bit.
  void undo(std::int64_t nodes);
  /// Takes away the nodes from `nodes` on, settled ones too: then what is left is connected anew.
  void cut(std::int64_t nodes, const BeamKeys& keys, ThreadPool& pool);
  /// Nodes that cannot be undone one by one: those that came before the first add().
  std::int64_t settled() const { return nodes() - std::ssize(added_); }

  std::int64_t bytes() const;  ///< memory held

 private:
  struct Change {
    Node node;
    std::int32_t slot;
    Link before;
  };

  Link* row(Node node) { return links_.data() + std::int64_t{node} * degree_; }
  int count(Node node) const { return static_cast<int>(links(node).size()); }
  void set(Node node, int slot, Link link);
  int slot_of_farthest(Node node, const BeamKeys& keys) const;
  int slot_for(Node node, Node target, const BeamKeys& keys, const Worth& worth) const;
  void link(Node from, Node to, const BeamKeys& keys, const Worth& worth);
  bool has_room(Node node) const;
  Node parent_near(Node child, std::span<const Node> wanted) const;
  void hang(Node node, std::span<const Node> near, const BeamKeys& keys);
  void undo_last();
  void drop_from(std::int64_t nodes);
  void connect(const BeamKeys& keys, ThreadPool& pool);
  std::int64_t spread(Node from, std::vector<bool>& reached);

  int degree_;
  HugeVector<Link> links_;  // [nodes, degree]
  std::vector<Node> entries_;
  std::vector<Change> changes_;      // by add(), in order
  std::vector<std::int64_t> added_;  // per node added: its first change
};

/// Squared Euclidean distances of a node's key to those of others, as the coded keys say.
void distances_to(Node from, std::span<const Node> to, const BeamKeys& keys, std::span<float> out);
/// Nearest first; equal distances by rising node, those that are not numbers last.
void sort_by_distance(Node from, std::vector<Node>& nodes, const BeamKeys& keys);
/// The coded key as numbers, out [d].
void decode_key(Node node, const BeamKeys& keys, std::span<float> out);

}  // namespace lode
