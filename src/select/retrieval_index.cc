// SPDX-License-Identifier: Apache-2.0
#include "select/retrieval_index.h"

#include <algorithm>
#include <cmath>

#include "ann/graph_build.h"
#include "ann/nearest.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kBatch = 64;        // keys that join the graphs together; until then they are scanned
constexpr std::int64_t kKeysPerItem = 64;  // of one thread
constexpr std::int64_t kGuides = 128;      // queries kept for adding keys
constexpr std::int64_t kGuideRank = 64;    // the key whose product is a guide's floor
constexpr std::int64_t kGuidesPerKey = 4;  // whose walks find a new key's neighbours
constexpr std::int64_t kGuideBeam = 48, kGuideKeep = 96;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Queries at even steps through all of them, with what a key must reach to be in their lists.
RetrievalIndex::Guides guides_of(Matrix<const float> queries, Matrix<const float> keys, ThreadPool& pool) {
  RetrievalIndex::Guides guides;
  const std::int64_t count = std::min(kGuides, queries.rows), d = queries.cols;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::span<const float> q = queries[i * queries.rows / count];
    guides.queries.insert(guides.queries.end(), q.begin(), q.end());
  }
  const std::int64_t rank = std::min(kGuideRank, keys.rows);
  const auto nearest = nearest_keys({guides.queries.data(), count, d}, keys, rank, pool);
  for (std::int64_t i = 0; i < count && rank > 0; ++i) {
    const Node last = nearest[at((i + 1) * rank - 1)];
    guides.floors.push_back(kernels().dot(guides.queries.data() + i * d, keys[last].data(), d));
  }
  guides.queries.resize(guides.floors.size() * at(d));
  return guides;
}

}  // namespace

RetrievalIndex::RetrievalIndex(const Shape& shape)
    : shape_(shape),
      coded_(shape.head_dim),
      graphs_(at(shape.graphs), KeyGraph(shape.degree)),
      guides_(at(shape.graphs)) {}

RetrievalIndex::RetrievalIndex(const Shape& shape, const KvRows& kv, Position end,
                               const std::vector<std::vector<float>>& queries, ThreadPool& pool)
    : RetrievalIndex(shape) {
  const std::int64_t count = std::max<std::int64_t>(0, std::int64_t{end} - shape.begin), d = shape.head_dim;
  code(0, count, kv, pool);
  std::vector<float> keys(at(count * d));  // [count, d]
  pool.for_each((count + kKeysPerItem - 1) / kKeysPerItem, [&](std::int64_t item, int) {
    for (std::int64_t i = item * kKeysPerItem; i < std::min(count, (item + 1) * kKeysPerItem); ++i)
      read_stored_keys({&kv, 1}, shape.begin + static_cast<Position>(i), nullptr,
                       std::span(keys).subspan(at(i * d), at(d)));
  });
  for (std::size_t g = 0; g < graphs_.size(); ++g) {
    const Matrix<const float> own(queries[g].data(), std::ssize(queries[g]) / d, d);
    graphs_[g] = build_graph({keys.data(), count, d}, own, coded_.view(), shape.degree, pool);
    guides_[g] = guides_of(own, {keys.data(), count, d}, pool);
  }
}

RetrievalIndex RetrievalIndex::restore(const Shape& shape, const KvRows& kv, std::vector<KeyGraph> graphs,
                                       std::vector<Guides> guides, ThreadPool& pool) {
  RetrievalIndex index(shape);
  index.graphs_ = std::move(graphs);
  index.guides_ = std::move(guides);
  index.code(0, index.keys(), kv, pool);
  return index;
}

/// Codes keys [first, end) behind those coded before.
void RetrievalIndex::code(std::int64_t first, std::int64_t end, const KvRows& kv, ThreadPool& pool) {
  coded_.resize(end);
  pool.for_each((end - first + kKeysPerItem - 1) / kKeysPerItem, [&](std::int64_t item, int) {
    check_cancel();
    std::vector<float> key(at(shape_.head_dim));
    const std::int64_t begin = first + item * kKeysPerItem;
    for (std::int64_t i = begin; i < std::min(end, begin + kKeysPerItem); ++i) {
      read_stored_keys({&kv, 1}, shape_.begin + static_cast<Position>(i), nullptr, key);
      coded_.put(i, key);
    }
  });
}

std::int64_t RetrievalIndex::keys_for(Position far_end) const {
  const std::int64_t far = std::max<std::int64_t>(0, std::int64_t{far_end} - shape_.begin);
  const std::int64_t settled = graphs_[0].settled();
  return far <= settled ? settled : settled + (far - settled) / kBatch * kBatch;
}

void RetrievalIndex::advance(std::int64_t keys, const KvRows& kv, RetrievalScratch& scratch) {
  LODE_ASSERT(keys >= graphs_[0].settled());
  if (keys < this->keys()) {
    for (KeyGraph& graph : graphs_) graph.undo(keys);
    coded_.resize(keys);
  }
  scratch.key.resize(at(shape_.head_dim));
  while (this->keys() < keys) {
    if (this->keys() % kBatch == 0) check_cancel();
    const std::int64_t node = this->keys();
    read_stored_keys({&kv, 1}, shape_.begin + static_cast<Position>(node), nullptr, scratch.key);
    coded_.resize(node + 1);
    coded_.put(node, scratch.key);
    for (std::size_t g = 0; g < graphs_.size(); ++g) add(g, scratch);
  }
}

/// Links the key in scratch.key, the next node of a graph, to what queries find that would find it as well;
/// where there are none, to what the key finds as a query.
void RetrievalIndex::add(std::size_t number, RetrievalScratch& scratch) {
  KeyGraph& graph = graphs_[number];
  const Guides& guides = guides_[number];
  const WalkKeys keys = coded_.view();
  const std::int64_t d = shape_.head_dim, count = std::ssize(guides.floors);
  const auto node = static_cast<Node>(graph.nodes());
  std::vector<std::pair<float, const float*>> order;  // how far below a guide's list the key stands
  if (count > 0) {
    scratch.scores.resize(at(count));
    kernels().gemv(scratch.key.data(), 1, guides.queries.data(), DType::f32, d, 0, count,
                   scratch.scores.data(), count);
    for (std::int64_t g = 0; g < count; ++g) {
      const float below = guides.floors[at(g)] - scratch.scores[at(g)];
      order.emplace_back(std::isnan(below) ? INFINITY : below, guides.queries.data() + g * d);
    }
    const auto few = std::min(order.size(), at(kGuidesPerKey));
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(few), order.end());
    order.resize(few);
  }
  order.emplace_back(0.0f, scratch.key.data());
  scratch.candidates.clear();
  if (scratch.walks.size() < order.size()) scratch.walks.resize(order.size());
  const std::span<Walk> walks = std::span(scratch.walks).first(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    walks[i].begin(graph, keys, order[i].second, kGuideKeep);
    walks[i].visit(graph.entries());
  }
  run_together(walks, kGuideBeam);
  for (const Walk& walk : walks)
    for (std::int64_t rank = 0; rank < walk.found(); ++rank) scratch.candidates.push_back(walk.node(rank));
  std::sort(scratch.candidates.begin(), scratch.candidates.end());
  scratch.candidates.erase(std::unique(scratch.candidates.begin(), scratch.candidates.end()),
                           scratch.candidates.end());
  sort_by_distance(node, scratch.candidates, keys);
  const std::int64_t found = std::ssize(scratch.candidates);
  scratch.rows.resize(at(found * d));
  scratch.distance.resize(at(found));
  for (std::int64_t i = 0; i < found; ++i)
    decode_key(scratch.candidates[at(i)], keys, std::span(scratch.rows).subspan(at(i * d), at(d)));
  distances_to(node, scratch.candidates, keys, scratch.distance);
  std::vector<Node> neighbours;
  for (const std::int32_t i :
       prune({scratch.rows.data(), found, d}, scratch.distance, std::max(2, shape_.degree * 3 / 4), true))
    neighbours.push_back(scratch.candidates[at(i)]);
  graph.add(neighbours, keys);
}

void RetrievalIndex::cut(std::int64_t tokens, ThreadPool& pool) {
  const std::int64_t most = std::max<std::int64_t>(0, tokens - shape_.begin);
  if (keys() <= most) return;
  // A batch goes as a whole, as it came.
  const std::int64_t keep = std::min(most, keys_for(static_cast<Position>(shape_.begin + most)));
  for (KeyGraph& graph : graphs_) graph.cut(keep, coded_.view(), pool);
  coded_.resize(keep);
}

std::int64_t RetrievalIndex::graph_bytes() const {
  std::int64_t bytes = 0;
  for (const KeyGraph& graph : graphs_) bytes += graph.bytes();
  return bytes;
}

std::int64_t RetrievalIndex::bytes() const {
  std::int64_t bytes = coded_.bytes() + graph_bytes();
  for (const Guides& guides : guides_)
    bytes +=
        static_cast<std::int64_t>((guides.queries.capacity() + guides.floors.capacity()) * sizeof(float));
  return bytes;
}

}  // namespace lode
