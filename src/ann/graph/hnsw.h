// SPDX-License-Identifier: Apache-2.0
// Hierarchical navigable small world graphs over keys (Malkov and Yashunin 2016), nearness being the inner
// product.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lodestone/kv_view.h"

namespace lode {

/// Keys as they lie in a store: node i is row `first + i`.
struct GraphKeys {
  KvRows rows;
  Position first = 0;
};

/// What searches and insertions of one thread work with.
struct HnswScratch {
  using Scored =
      std::pair<float, std::int32_t>;  // best first: the larger score, of equal ones the newer node
  std::vector<Scored> open, best;      // heaps
  std::vector<std::uint32_t> visited;  // [nodes] the search that looked at the node last
  std::uint32_t search = 0;
  std::vector<std::int32_t> nodes;
  std::vector<Position> rows;
  std::vector<float> scores, key, other;
  std::int64_t scored = 0, expanded = 0;  // since the caller set them
};

/// Nodes are added one after the other, and the graph is a function of their keys alone: added in one go, in
/// many, or taken away and added again, it is the same to the bit.
class Hnsw {
 public:
  struct Shape {
    int m = 16;                          ///< M: links of a node on each level, twice as many on level 0
    std::int64_t ef_construction = 200;  ///< nodes kept while looking for a new one's neighbours
    std::uint64_t seed = 0;              ///< of the levels
  };
  Hnsw() = default;
  explicit Hnsw(const Shape& shape) : shape_(shape) {}

  std::int64_t nodes() const { return std::ssize(levels_); }
  /// Nodes that can only be taken away all at once: those that grow() was told to settle.
  std::int64_t settled() const { return settled_; }

  /// Adds nodes up to `nodes`; the first `settled` of them need not be taken away one by one.
  void grow(std::int64_t nodes, std::int64_t settled, const GraphKeys& keys, HnswScratch& scratch);
  /// Takes away nodes from `nodes` on; where they are settled, all, so that grow() must come again.
  void cut(std::int64_t nodes);

  /// The `ef` nodes found nearest to q, in scratch.best, in no order.
  void search(const float* q /*[d]*/, std::int64_t ef, const GraphKeys& keys, HnswScratch& scratch) const;

  std::int64_t bytes() const;  ///< memory held
  /// Links of all nodes: on level 0 [nodes, 2 M]; above, node after node, [its levels, M]; -1 behind the
  /// last.
  std::span<const std::int32_t> ground() const { return ground_; }
  std::vector<std::int32_t> upper() const;
  /// What these gave; InputError, which begins with `where`, unless all links are to nodes of their level.
  static Hnsw restore(const Shape& shape, std::int64_t nodes, std::span<const std::int32_t> ground,
                      std::span<const std::int32_t> upper, const std::string& where);

 private:
  struct Change {
    std::int32_t node = 0;
    int level = 0;
    std::vector<std::int32_t> before;  // its links
  };
  struct Added {
    std::size_t changes = 0;  // before it
    std::int32_t entry = -1;
  };

  int level_of(std::int64_t node) const;
  int width(int level) const { return level == 0 ? 2 * shape_.m : shape_.m; }
  std::span<std::int32_t> slots(std::int32_t node, int level);
  std::span<const std::int32_t> links(std::int32_t node, int level) const;
  void push_node();
  void add(const GraphKeys& keys, HnswScratch& s);
  void link(std::int32_t node, int level, const GraphKeys& keys, HnswScratch& s);
  void set_links(std::int32_t node, int level, std::span<const std::int32_t> targets);
  void undo_last();
  void search_level(const float* q, int level, std::int64_t ef, const GraphKeys& keys, HnswScratch& s) const;
  void score(const float* q, const GraphKeys& keys, HnswScratch& s) const;
  static std::vector<std::int32_t> choose(std::vector<HnswScratch::Scored> candidates, int most,
                                          const GraphKeys& keys, HnswScratch& s);

  Shape shape_;
  std::int64_t settled_ = 0;
  std::int32_t entry_ = -1;
  std::vector<std::uint8_t> levels_;              // [nodes]
  std::vector<std::int32_t> ground_;              // [nodes, 2 M]
  std::vector<std::vector<std::int32_t>> upper_;  // [nodes][level, M]
  std::vector<Change> changes_;                   // by nodes that are not settled
  std::vector<Added> added_;                      // per such node
};

}  // namespace lode
