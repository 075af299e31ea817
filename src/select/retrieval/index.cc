// SPDX-License-Identifier: Apache-2.0
#include "select/retrieval/index.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ann/graph/beam_choice.h"
#include "ann/graph/build.h"
#include "ann/graph/graph_device.h"
#include "ann/nearest.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kBatch = 64;        // keys that join the graphs together; until then they are scanned
constexpr std::int64_t kKeysPerItem = 64;  // of one thread
// Neither divides what queries of a group's heads, which take turns, are counted by: all heads are asked.
constexpr std::int64_t kLeastGuides = 127, kMostGuides = 1023;  // queries kept for adding keys
constexpr std::int64_t kKeysPerGuide = 64;
constexpr std::int64_t kJudges = 255;      // queries that tell how wide searches must be
constexpr std::int64_t kGuideRank = 64;    // the key whose product is a guide's floor
constexpr std::int64_t kGuidesPerKey = 4;  // whose walks find a new key's neighbours
constexpr std::int64_t kGuideBeam = 48, kGuideKeep = 96;
constexpr std::int64_t kFinders = 8;  // best nodes of a guide's walk that lead to a new key in its list
constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// As many as tell what queries want of so many keys. No number that the heads of a group divide: queries are taken at
/// equal distances, and come head by head.
constexpr std::int64_t guides_for(std::int64_t keys) {
  const std::int64_t wanted = std::clamp(keys / kKeysPerGuide, kLeastGuides, kMostGuides);
  return std::max(kLeastGuides, wanted / 30 * 30 + 1);
}

/// body(key, scratch) for keys [0, count).
template <class Body>
void for_keys(std::int64_t count, ThreadPool& pool, const Body& body) {
  pool.for_each((count + kKeysPerItem - 1) / kKeysPerItem, [&](std::int64_t item, int) {
    check_cancel();
    std::vector<float> scratch;
    for (std::int64_t i = item * kKeysPerItem; i < std::min(count, (item + 1) * kKeysPerItem); ++i)
      body(i, scratch);
  });
}

/// The keys from `begin` on, as numbers [count, d].
std::vector<float> read_keys(const KvRows& kv, Position begin, std::int64_t count, std::int64_t d,
                             ThreadPool& pool) {
  std::vector<float> rows(at(count * d));
  for_keys(count, pool, [&](std::int64_t i, std::vector<float>&) {
    read_stored_keys({&kv, 1}, begin + static_cast<Position>(i), nullptr,
                     std::span(rows).subspan(at(i * d), at(d)));
  });
  return rows;
}

/// Queries at even steps through all of them, with what a key must reach to be in their lists.
RetrievalIndex::Guides guides_of(Matrix<const float> queries, Matrix<const float> keys, GraphDevice& device) {
  RetrievalIndex::Guides guides;
  const std::int64_t count = std::min(guides_for(keys.rows), queries.rows), d = queries.cols;
  guides.queries.reserve(at(count * d));
  guides.floors.reserve(at(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::span<const float> q = queries[i * queries.rows / count];
    guides.queries.insert(guides.queries.end(), q.begin(), q.end());
  }
  const std::int64_t rank = std::min(kGuideRank, keys.rows);
  const auto nearest = device.nearest({guides.queries.data(), count, d}, keys, rank);
  for (std::int64_t i = 0; i < count && rank > 0; ++i) {
    const Node last = nearest[at((i + 1) * rank - 1)];
    guides.floors.push_back(kernels().dot(guides.queries.data() + i * d, keys[last].data(), d));
  }
  guides.queries.resize(guides.floors.size() * at(d));
  return guides;
}

/// How far a key stands above each guide's list, out [guides].
void above_lists(const RetrievalIndex::Guides& guides, std::span<const float> key, std::vector<float>& out) {
  const std::int64_t count = std::ssize(guides.floors);
  out.resize(at(count));
  if (count == 0) return;
  kernels().gemv(key.data(), 1, guides.queries.data(), DType::f32, std::ssize(key), 0, count, out.data(),
                 count);
  for (std::size_t g = 0; g < out.size(); ++g) {
    out[g] -= guides.floors[g];
    if (std::isnan(out[g])) out[g] = -std::numeric_limits<float>::infinity();
  }
}

/// The guides that want a key most, at most kGuidesPerKey.
std::vector<std::int64_t> eager_guides(const std::vector<float>& above) {
  std::vector<std::int64_t> guides(above.size());
  std::iota(guides.begin(), guides.end(), 0);
  const auto few = static_cast<std::ptrdiff_t>(std::min(guides.size(), at(kGuidesPerKey)));
  std::partial_sort(guides.begin(), guides.begin() + few, guides.end(), [&](std::int64_t a, std::int64_t b) {
    return above[at(a)] != above[at(b)] ? above[at(a)] > above[at(b)] : a < b;
  });
  guides.resize(at(few));
  return guides;
}

}  // namespace

RetrievalIndex::RetrievalIndex(const Shape& shape)
    : shape_(shape),
      body_(std::make_shared<Body>(Body{.space = KeySpace(shape.head_dim),
                                        .coded = QuantizedKeys(shape.head_dim),
                                        .graphs = std::vector(at(shape.graphs), KeyGraph(shape.degree)),
                                        .guides = std::vector<Guides>(at(shape.graphs)),
                                        .worth = std::vector<std::vector<float>>(at(shape.graphs))})) {}

bool RetrievalIndex::share(const RetrievalIndex& other) {
  const Body &own = *body_, &found = *other.body_;
  const auto same_graph = [](const KeyGraph& a, const KeyGraph& b) {
    return std::ranges::equal(a.rows(), b.rows()) && std::ranges::equal(a.entries(), b.entries());
  };
  const auto same_guides = [](const Guides& a, const Guides& b) {
    return a.queries == b.queries && a.floors == b.floors;
  };
  // The shape first: graphs without keys are equal whatever degree they will grow to.
  if (shape_ != other.shape_ || !std::ranges::equal(own.graphs, found.graphs, same_graph) ||
      !std::ranges::equal(own.guides, found.guides, same_guides) ||
      own.space.values() != found.space.values())
    return false;
  body_ = other.body_;
  return true;
}

RetrievalIndex RetrievalIndex::settled() const {
  RetrievalIndex copy = *this;
  copy.body_ = std::make_shared<Body>(*body_);
  copy.settle();
  return copy;
}

KeySpace RetrievalIndex::space_for(const Shape& shape, const KvRows& kv, Position end,
                                   const std::vector<float>& queries) {
  const std::int64_t far = std::max<std::int64_t>(0, std::int64_t{end} - shape.begin), d = shape.head_dim;
  if (far == 0) return KeySpace(shape.head_dim);
  const std::int64_t count = std::min(far, KeySpace::kSample);
  std::vector<float> rows(at(count * d));
  const Matrix<float> keys(rows.data(), count, d);
  for (std::int64_t i = 0; i < count; ++i)
    read_stored_keys({&kv, 1}, shape.begin + static_cast<Position>(i * far / count), nullptr, keys[i]);
  const std::vector<float> stand_ins = queries.empty() ? stand_in_queries(keys) : std::vector<float>();
  const std::vector<float>& asked = queries.empty() ? stand_ins : queries;
  return KeySpace::of({asked.data(), std::ssize(asked) / d, d}, keys, shape.numbers);
}

std::int64_t RetrievalIndex::bytes_for(const Shape& shape, std::int64_t keys) {
  if (keys <= 0) return 0;
  const int seen =
      std::min(shape.head_dim, shape.numbers > 0 ? shape.numbers : CodedRows::kLine - CodedRows::kScaleBytes);
  const std::int64_t row = CodedRows::stride_for(seen) + std::int64_t{sizeof(float)};
  const std::int64_t links = shape.degree * std::int64_t{sizeof(Link)};
  const std::int64_t floats =
      shape.graphs * guides_for(keys) * (shape.head_dim + 1) + KeySpace::value_count(shape.head_dim, seen);
  return keys * (row + shape.graphs * links) + floats * std::int64_t{sizeof(float)};
}

RetrievalIndex::RetrievalIndex(const Shape& shape, const KvRows& kv, Position end, KeySpace space,
                               const std::vector<std::vector<float>>& queries, const Goal& goal,
                               ThreadPool& pool, GraphDevice& device)
    : RetrievalIndex(shape) {
  const std::int64_t count = std::max<std::int64_t>(0, std::int64_t{end} - shape.begin), d = shape.head_dim;
  if (count == 0) return;
  std::vector<float> rows = read_keys(kv, shape.begin, count, d, pool);
  const Matrix<float> keys(rows.data(), count, d);
  const bool asked =
      std::any_of(queries.begin(), queries.end(), [](const auto& own) { return !own.empty(); });
  const std::vector<float> stand_ins = asked ? std::vector<float>() : stand_in_queries(keys);
  use(std::move(space));
  const std::int64_t m = body_->space.numbers();
  std::vector<float> seen(at(count * m));
  body_->coded.resize(count);
  for_keys(count, pool, [&](std::int64_t i, std::vector<float>&) {
    const std::span<float> own = std::span(seen).subspan(at(i * m), at(m));
    body_->space.key(keys[i].data(), own);
    body_->coded.put(i, own);
  });
  for (std::size_t g = 0; g < body_->graphs.size(); ++g) {
    const std::vector<float>& ask = queries[g].empty() ? stand_ins : queries[g];
    const Matrix<const float> own(ask.data(), std::ssize(ask) / d, d);
    std::vector<float> towards(at(own.rows * m));
    for_keys(own.rows, pool, [&](std::int64_t i, std::vector<float>&) {
      body_->space.query(own[i].data(), std::span(towards).subspan(at(i * m), at(m)));
    });
    body_->graphs[g] = build_graph({seen.data(), count, m}, {towards.data(), own.rows, m},
                                   body_->coded.view(), shape.degree, pool, !queries[g].empty(), &device);
    if (!queries[g].empty()) body_->guides[g] = guides_of(own, keys, device);
  }
  beam_ = beam_for(goal, keys, pool);
}

void RetrievalIndex::judge(const KvRows& kv, const Goal& goal, ThreadPool& pool) {
  beam_ = 0;
  if (goal.k == 0) return;
  settle();
  const std::int64_t d = shape_.head_dim;
  const std::vector<float> rows = read_keys(kv, shape_.begin, keys(), d, pool);
  beam_ = beam_for(goal, {rows.data(), keys(), d}, pool);
}

/// What those of the graphs take that queries made; 0 where nobody asks.
std::int64_t RetrievalIndex::beam_for(const Goal& goal, Matrix<const float> keys, ThreadPool& pool) const {
  std::int64_t beam = 0;
  for (std::size_t g = 0; g < body_->graphs.size() && goal.k > 0; ++g) {
    const std::vector<float>& own = goal.asked[g];
    if (own.empty() || body_->guides[g].queries.empty()) continue;
    const std::int64_t d = keys.cols, m = body_->space.numbers(), count = std::ssize(own) / d;
    std::vector<float> towards(at(count * m));
    for (std::int64_t i = 0; i < count; ++i)
      body_->space.query(own.data() + i * d, std::span(towards).subspan(at(i * m), at(m)));
    const std::vector<Node> nearest = nearest_keys({own.data(), count, d}, keys, goal.k, pool);
    beam = std::max(
        beam, choose_beam(body_->graphs[g], {{towards.data(), count, m}, nearest}, goal.recall,
                          std::max<std::int64_t>(1, keys.rows / kKeysPerBeam), body_->coded.view(), pool));
  }
  return beam;
}

RetrievalIndex RetrievalIndex::restore(const Shape& shape, const KvRows& kv, KeySpace space,
                                       std::vector<KeyGraph> graphs, std::vector<Guides> guides,
                                       std::int64_t beam, ThreadPool& pool) {
  RetrievalIndex index(shape);
  index.beam_ = beam;
  index.body_->graphs = std::move(graphs);
  index.body_->guides = std::move(guides);
  index.use(std::move(space));
  index.code(kv, index.keys(), pool);
  return index;
}

void RetrievalIndex::use(KeySpace space) {
  body_->space = std::move(space);
  body_->coded = QuantizedKeys(body_->space.numbers());
}

/// Codes the first `count` keys.
void RetrievalIndex::code(const KvRows& kv, std::int64_t count, ThreadPool& pool) {
  body_->coded.resize(count);
  for_keys(count, pool, [&](std::int64_t i, std::vector<float>& scratch) {
    scratch.resize(at(shape_.head_dim + body_->space.numbers()));
    const std::span<float> key = std::span(scratch).first(at(shape_.head_dim));
    const std::span<float> seen = std::span(scratch).subspan(key.size());
    read_stored_keys({&kv, 1}, shape_.begin + static_cast<Position>(i), nullptr, key);
    body_->space.key(key.data(), seen);
    body_->coded.put(i, seen);
  });
}

std::int64_t RetrievalIndex::keys_for(Position far_end) const {
  const std::int64_t far = std::max<std::int64_t>(0, std::int64_t{far_end} - shape_.begin);
  const std::int64_t settled = body_->graphs[0].settled();
  return far <= settled ? settled : settled + (far - settled) / kBatch * kBatch;
}

void RetrievalIndex::advance(std::int64_t keys, const KvRows& kv, RetrievalScratch& scratch) {
  LODE_ASSERT(keys >= body_->graphs[0].settled());
  if (keys < this->keys()) {
    for (KeyGraph& graph : body_->graphs) graph.undo(keys);
    resize(keys);
  }
  scratch.key.resize(at(shape_.head_dim));
  while (this->keys() < keys) {
    if (this->keys() % kBatch == 0) check_cancel();
    const std::int64_t node = this->keys();
    read_stored_keys({&kv, 1}, shape_.begin + static_cast<Position>(node), nullptr, scratch.key);
    scratch.seen.resize(at(body_->space.numbers()));
    body_->space.key(scratch.key.data(), scratch.seen);
    resize(node + 1);
    body_->coded.put(node, scratch.seen);
    for (std::size_t g = 0; g < body_->graphs.size(); ++g) add(g, kv, scratch);
  }
}

/// Makes room for keys, or forgets those behind.
void RetrievalIndex::resize(std::int64_t keys) {
  const bool grows = keys > body_->coded.size();
  body_->coded.resize(keys);
  for (std::vector<float>& worth : body_->worth)
    if (grows || !worth.empty()) worth.resize(at(keys), kUnknown);
}

/// How far a key stands above the list of the guide that wants it most. Without guides its squared norm:
/// queries that lie like keys want long ones most.
float RetrievalIndex::worth_of(std::size_t number, Node node, const KvRows& kv, RetrievalScratch& scratch) {
  float& worth = body_->worth[number][at(node)];
  if (!std::isnan(worth)) return worth;
  const Guides& guides = body_->guides[number];
  if (guides.floors.empty()) return worth = body_->coded.view().squares[node];
  scratch.other.resize(at(shape_.head_dim));
  read_stored_keys({&kv, 1}, shape_.begin + static_cast<Position>(node), nullptr, scratch.other);
  above_lists(guides, scratch.other, scratch.scores);
  return worth = *std::ranges::max_element(scratch.scores);
}

/// Links the key in scratch.key and .seen, the next node of a graph, to what walks find for the guides that
/// want it most and for the key itself. A guide in whose list it stands passes by the best keys that its
/// walk finds: these lead to the new key, however far from them it lies.
void RetrievalIndex::add(std::size_t number, const KvRows& kv, RetrievalScratch& scratch) {
  KeyGraph& graph = body_->graphs[number];
  const Guides& guides = body_->guides[number];
  const BeamKeys keys = body_->coded.view();
  const std::int64_t d = shape_.head_dim, m = body_->space.numbers();
  above_lists(guides, scratch.key, scratch.scores);
  const std::vector<std::int64_t> eager = eager_guides(scratch.scores);
  scratch.towards.resize((eager.size() + 1) * at(m));
  if (scratch.walks.size() < eager.size() + 1) scratch.walks.resize(eager.size() + 1);
  const std::span<BeamSearch> walks = std::span(scratch.walks).first(eager.size() + 1);
  for (std::size_t i = 0; i < walks.size(); ++i) {
    const std::span<float> towards = std::span(scratch.towards).subspan(i * at(m), at(m));
    if (i < eager.size())
      body_->space.query(guides.queries.data() + eager[i] * d, towards);
    else
      std::ranges::copy(scratch.seen, towards.begin());
    walks[i].begin(graph, keys, towards.data(), kGuideKeep);
    walks[i].visit(graph.entries());
  }
  run_together(walks, kGuideBeam);
  scratch.candidates.clear();
  std::vector<Node> finders;
  for (std::size_t i = 0; i < walks.size(); ++i) {
    const bool wants = i < eager.size() && scratch.scores[at(eager[i])] >= 0.0f;
    for (std::int64_t rank = 0; rank < walks[i].found(); ++rank) {
      scratch.candidates.push_back(walks[i].node(rank));
      if (wants && rank < kFinders) finders.push_back(walks[i].node(rank));
    }
  }
  graph.add(neighbours_of(static_cast<Node>(graph.nodes()), scratch), finders, keys,
            [&](Node node) { return worth_of(number, node, kv, scratch); });
}

/// Those of scratch.candidates, each of which may stand there often, that a new node links to.
std::vector<Node> RetrievalIndex::neighbours_of(Node node, RetrievalScratch& scratch) const {
  const BeamKeys keys = body_->coded.view();
  const std::int64_t m = keys.d;
  std::sort(scratch.candidates.begin(), scratch.candidates.end());
  scratch.candidates.erase(std::unique(scratch.candidates.begin(), scratch.candidates.end()),
                           scratch.candidates.end());
  sort_by_distance(node, scratch.candidates, keys);
  const std::int64_t found = std::ssize(scratch.candidates);
  scratch.rows.resize(at(found * m));
  scratch.distance.resize(at(found));
  for (std::int64_t i = 0; i < found; ++i)
    decode_key(scratch.candidates[at(i)], keys, std::span(scratch.rows).subspan(at(i * m), at(m)));
  distances_to(node, scratch.candidates, keys, scratch.distance);
  std::vector<Node> neighbours;
  for (const std::int32_t i :
       prune({scratch.rows.data(), found, m}, scratch.distance, std::max(2, shape_.degree * 3 / 4), true))
    neighbours.push_back(scratch.candidates[at(i)]);
  return neighbours;
}

void RetrievalIndex::settle() {
  for (KeyGraph& graph : body_->graphs) graph.undo(graph.settled());
  resize(keys());
}

void RetrievalIndex::cut(std::int64_t tokens, ThreadPool& pool) {
  const std::int64_t most = std::max<std::int64_t>(0, tokens - shape_.begin);
  if (keys() > most) {  // else whoever shares it has cut it
    // A batch goes as a whole, as it came.
    const std::int64_t keep = std::min(most, keys_for(static_cast<Position>(shape_.begin + most)));
    for (KeyGraph& graph : body_->graphs) graph.cut(keep, body_->coded.view(), pool);
    resize(keep);
  }
  beam_ = std::min(beam_, keys());  // no wider than its keys, as a file promises
}

std::int64_t RetrievalIndex::graph_bytes() const {
  std::int64_t bytes = 0;
  for (const KeyGraph& graph : body_->graphs) bytes += graph.bytes();
  return bytes;
}

std::int64_t RetrievalIndex::bytes() const {
  std::int64_t bytes = body_->coded.bytes() + body_->space.bytes() + graph_bytes();
  for (const Guides& guides : body_->guides)
    bytes +=
        static_cast<std::int64_t>((guides.queries.capacity() + guides.floors.capacity()) * sizeof(float));
  for (const std::vector<float>& worth : body_->worth)
    bytes += static_cast<std::int64_t>(worth.capacity() * sizeof(float));
  return bytes;
}

}  // namespace lode
