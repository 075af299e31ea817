// SPDX-License-Identifier: Apache-2.0
// The index of `retrieval` for one sequence, layer and KV head: its far keys as queries tell them apart, in
// int8, and one graph over them for all query heads of the group, or one for each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ann/graph/beam_search.h"
#include "ann/graph/key_graph.h"
#include "ann/graph/key_space.h"
#include "ann/graph/quantized_keys.h"
#include "lodestone/kv_view.h"

namespace lode {

class GraphDevice;
class ThreadPool;

/// What a thread needs to add keys or to search; kept from call to call.
struct RetrievalScratch {
  std::vector<BeamSearch> walks = std::vector<BeamSearch>(1);  ///< that take turns
  std::vector<float> key, other, seen, towards, scores, rows, distance;
  std::vector<Node> candidates;
};

class RetrievalIndex {
 public:
  struct Shape {
    int head_dim = 0, degree = 0, graphs = 1;  ///< graphs: 1, or the heads of the group
    Position begin = 0;                        ///< position of node 0: the first key behind the sink
    int numbers = 0;  ///< of a key that walks compare; 0: as many as queries tell apart
    bool operator==(const Shape&) const = default;
  };

  /// What searches are to find: the share `recall` of the k best keys, on average over queries like `asked`
  /// [graphs][q, d], of which the graphs know nothing. k = 0: nothing is asked.
  struct Goal {
    std::int64_t k = 0;
    double recall = 0.0;
    std::vector<std::vector<float>> asked = {};
  };

  /// Without keys.
  explicit RetrievalIndex(const Shape& shape);
  RetrievalIndex(RetrievalIndex&&) = default;
  RetrievalIndex& operator=(RetrievalIndex&&) = default;
  /// In which directions walks will compare the keys [begin, end): of a sample of the queries [q, d], or of
  /// the keys where there are none. On one thread.
  static KeySpace space_for(const Shape& shape, const KvRows& kv, Position end,
                            const std::vector<float>& queries);
  /// Over the keys [begin, end). queries [graphs][q, d]: of whom each graph is made; may be empty. What
  /// `goal` takes is found with some of them, of which the graph is not made. `device` helps to
  /// build them.
  RetrievalIndex(const Shape& shape, const KvRows& kv, Position end, KeySpace space,
                 const std::vector<std::vector<float>>& queries, const Goal& goal, ThreadPool& pool,
                 GraphDevice& device);
  /// As if it had been built for this goal: beam() becomes what it takes.
  void judge(const KvRows& kv, const Goal& goal, ThreadPool& pool);
  /// What bytes() will be over so many keys. Where Shape::numbers is 0 it counts one cache line a key, which
  /// holds for up to 64 numbers; of more it is two where queries tell too many directions apart.
  static std::int64_t bytes_for(const Shape& shape, std::int64_t keys);

  std::int64_t keys() const { return body_->graphs[0].nodes(); }
  std::int64_t built_keys() const {
    return body_->graphs[0].settled();
  }  ///< those that did not come one by one
  /// Nodes that a search over the built keys must expand to reach the goal; 0 where none was given.
  std::int64_t beam() const { return beam_; }
  /// A search looks at about so many keys for each that it expands: where that is all of them it should scan.
  static constexpr std::int64_t kKeysPerBeam = 16;
  /// How many keys the graphs hold when keys [begin, far_end) are far: those of build(), and what came later
  /// in whole batches. So a search depends on its far keys, not on when others were added.
  std::int64_t keys_for(Position far_end) const;
  /// Adds or takes away keys, one after the other, until there are `keys`, of those from keys_for.
  void advance(std::int64_t keys, const KvRows& kv, RetrievalScratch& scratch);
  /// Takes away what advance() added.
  void settle();
  /// Another over the same graphs and keys, held once: what one of them adds or takes away the other finds
  /// so, for advance() brings both to the same state. How wide a search is (beam()) is each one's own.
  RetrievalIndex shared() const { return *this; }
  /// Shares the other's graphs and keys from here on, where they are the same as its own; else false.
  bool share(const RetrievalIndex& other);
  /// A copy that shares nothing, without what advance() added.
  RetrievalIndex settled() const;
  /// Forgets keys at positions from `tokens` on.
  void cut(std::int64_t tokens, ThreadPool& pool);

  const KeyGraph& graph(int number) const { return body_->graphs[static_cast<std::size_t>(number)]; }
  BeamKeys walk_keys() const { return body_->coded.view(); }
  const KeySpace& space() const { return body_->space; }  ///< of the walk's keys and queries
  std::int64_t bytes() const;                             ///< memory held, that which is shared included
  std::int64_t graph_bytes() const;                       ///< of it, links

  /// Parts of a saved index.
  struct Guides {
    std::vector<float> queries;  // [g, d]: some of the queries that a graph was made of
    std::vector<float> floors;   // [g]: product with the last key of its list
  };
  const Guides& guides(int number) const { return body_->guides[static_cast<std::size_t>(number)]; }
  /// The index of the given graphs over the keys of `kv`.
  static RetrievalIndex restore(const Shape& shape, const KvRows& kv, KeySpace space,
                                std::vector<KeyGraph> graphs, std::vector<Guides> guides, std::int64_t beam,
                                ThreadPool& pool);

 private:
  RetrievalIndex(const RetrievalIndex&) = default;  // shared() says so
  void use(KeySpace space);
  void code(const KvRows& kv, std::int64_t count, ThreadPool& pool);
  void add(std::size_t number, const KvRows& kv, RetrievalScratch& scratch);
  std::vector<Node> neighbours_of(Node node, RetrievalScratch& scratch) const;
  float worth_of(std::size_t number, Node node, const KvRows& kv, RetrievalScratch& scratch);
  void resize(std::int64_t keys);
  std::int64_t beam_for(const Goal& goal, Matrix<const float> keys, ThreadPool& pool) const;

  struct Body {
    KeySpace space;
    QuantizedKeys coded;
    std::vector<KeyGraph> graphs;  // [graphs]
    std::vector<Guides> guides;    // [graphs]
    // [graphs][keys] worth_of(); NaN where nobody has asked yet. Empty until the graphs grow.
    std::vector<std::vector<float>> worth;
  };

  Shape shape_;
  std::int64_t beam_ = 0;
  std::shared_ptr<Body> body_;
};

}  // namespace lode
