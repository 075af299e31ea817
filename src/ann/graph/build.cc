// SPDX-License-Identifier: Apache-2.0
// RoarGraph (Chen et al. 2024), the index of RetrievalAttention, section 3.2: bipartite graph, projection,
// connectivity enhancement. Ours differs where attention needs it:
//   - Each key of a query's list is a pivot, not its first alone: queries of one head share few first keys. A
//     pivot's candidates come from all queries whose lists hold it (RoarGraph's code keeps the last query's),
//     the ones that most queries name together with it first.
//   - Occlusion compares distances that the queries see (ann/graph/key_space.h). Under bare inner products, as in
//     RoarGraph, keys of large norm occlude all others.
//   - Keys in no list, which RoarGraph leaves to its enhancement, are linked to what a walk towards them
//     finds; the graph itself then makes every key reachable.
//   - Walks for the same queries then tell which links are followed in vain, and which keys are missed.
#include "ann/graph/build.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "ann/graph/beam_search.h"
#include "ann/graph/graph_device.h"
#include "ann/graph/tune.h"
#include "ann/nearest.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kNearest = 64;      // keys of a query's list (RoarGraph: 100)
constexpr std::int64_t kListsPerKey = 32;  // those in which a key stands highest tell its candidates
constexpr std::int64_t kWalkBeam = 48;     // towards keys in no list
constexpr std::int64_t kStandIns = 8192;   // keys that stand in for queries
constexpr std::int64_t kNodesPerItem = 64;
constexpr std::int64_t kLeastTold = 256;    // queries of which some can be spared to judge a tuned graph
constexpr std::int64_t kJudges = 512;       // so many, of many queries
constexpr std::int64_t kLeastTuned = 4096;  // keys: of fewer, walks score a large part whatever the links are

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

std::int64_t per_query_of(Matrix<const float> keys) {
  return std::min(kNearest, keys.rows);
}

/// Queries and their nearest keys.
struct AskedKeys {
  explicit AskedKeys(std::int64_t numbers) : width(numbers) {}
  Matrix<const float> matrix() const { return {queries.data(), std::ssize(queries) / width, width}; }

  std::int64_t width;
  std::vector<float> queries;  // [q, m]
  std::vector<Node> nearest;   // [q, per_query_of]
};

class Builder {
 public:
  Builder(Matrix<const float> keys, const AskedKeys& of, const BeamKeys& coded, int degree, ThreadPool& pool,
          GraphDevice* device)
      : keys_(keys),
        coded_(coded),
        degree_(degree),
        forward_(forward_links(degree)),
        pool_(pool),
        device_(device),
        queries_(of.matrix()),
        per_query_(per_query_of(keys)),
        nearest_(of.nearest),
        links_(static_cast<std::size_t>(keys.rows)) {}

  /// `others`: queries by which to judge whether it can be tuned; none: it is not.
  KeyGraph build(const AskedKeys& others) {
    count_lists();
    std::vector<Node> rows;
    if (device_ != nullptr) linker_ = device_->linker(keys_, nearest_, per_query_, degree_);
    if (linker_ != nullptr) {
      rows = linker_->link_listed();
    } else {
      measure();
      invert();
      link_co_retrieved();
      add_reverse(links_);
      rows = rows_of(links_);
    }
    link_unlisted(rows);
    linker_ = nullptr;
    const KeyGraph graph(degree_, rows, entries(), coded_, pool_);
    if (others.nearest.empty()) return graph;
    return tune_graph(graph, {queries_, nearest_}, {others.matrix(), others.nearest}, coded_, pool_, device_);
  }

 private:
  using Lists = std::vector<std::vector<Node>>;

  /// body(node, worker) for all nodes.
  template <class Body>
  void for_nodes(const Body& body) {
    pool_.for_each((keys_.rows + kNodesPerItem - 1) / kNodesPerItem, [&](std::int64_t item, int worker) {
      check_cancel();
      for (std::int64_t x = item * kNodesPerItem; x < std::min(keys_.rows, (item + 1) * kNodesPerItem); ++x)
        body(static_cast<Node>(x), worker);
    });
  }

  void measure() {
    squares_.resize(at(keys_.rows));
    for (std::int64_t x = 0; x < keys_.rows; ++x)
      squares_[at(x)] = kernels().dot(keys_[x].data(), keys_[x].data(), keys_.cols);
  }
  /// As KeyGraph takes them.
  std::vector<Node> rows_of(const Lists& links) const {
    std::vector<Node> rows(links.size() * at(degree_), -1);
    for (std::size_t x = 0; x < links.size(); ++x)
      std::copy(links[x].begin(), links[x].end(), rows.begin() + static_cast<std::ptrdiff_t>(x) * degree_);
    return rows;
  }
  void count_lists();
  void invert();
  void link_co_retrieved();
  void link_unlisted(std::vector<Node>& rows);
  std::vector<Node> near_by_walks(std::span<const Node> nodes, const std::vector<Node>& rows,
                                  std::int64_t each) const;
  void add_reverse(const Lists& from);
  std::vector<Node> pruned(Node node, std::span<const Node> candidates, std::int64_t most, bool fill) const;
  std::vector<Node> entries() const;

  std::int64_t listed(Node node) const { return offset_[at(node + 1)] - offset_[at(node)]; }

  Matrix<const float> keys_;  // [n, m]
  const BeamKeys& coded_;
  int degree_, forward_;
  ThreadPool& pool_;
  GraphDevice* device_;          // or null
  Matrix<const float> queries_;  // [q, m]
  std::int64_t per_query_;
  std::span<const Node> nearest_;     // [q, per_query]
  std::vector<std::int64_t> offset_;  // [n + 1]
  std::vector<std::int32_t> lists_;   // per key the queries whose lists hold it, higher ranks first
  std::vector<float> squares_;        // [n] of keys_
  Lists links_;                       // [n]
  std::unique_ptr<GraphLinker> linker_;
};

void Builder::count_lists() {
  offset_.assign(at(keys_.rows + 1), 0);
  for (const Node key : nearest_) ++offset_[at(key + 1)];
  std::partial_sum(offset_.begin(), offset_.end(), offset_.begin());
}

void Builder::invert() {
  lists_.resize(nearest_.size());
  std::vector<std::int64_t> next(offset_.begin(), offset_.end() - 1);
  for (std::int64_t rank = 0; rank < per_query_; ++rank)
    for (std::int64_t q = 0; q < queries_.rows; ++q)
      lists_[at(next[at(nearest_[at(q * per_query_ + rank)])]++)] = static_cast<std::int32_t>(q);
}

/// The most useful candidates' order of distance from `node`, pruned.
std::vector<Node> Builder::pruned(Node node, std::span<const Node> candidates, std::int64_t most,
                                  bool fill) const {
  const std::int64_t d = keys_.cols;
  const float* const own = keys_[node].data();
  std::vector<std::pair<float, Node>> order;
  for (const Node c : candidates) {
    if (c == node) continue;
    const float distance = squares_[at(node)] + squares_[at(c)] - 2 * kernels().dot(own, keys_[c].data(), d);
    order.emplace_back(std::isnan(distance) ? INFINITY : distance, c);
  }
  std::sort(order.begin(), order.end());
  std::vector<float> rows(order.size() * at(d)), distance(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    distance[i] = order[i].first;
    std::copy_n(keys_[order[i].second].data(), d, rows.data() + i * at(d));
  }
  std::vector<Node> kept;
  for (const std::int32_t i : prune({rows.data(), std::ssize(order), d}, distance, most, fill))
    kept.push_back(order[at(i)].second);
  return kept;
}

/// Links of the keys that stand in some query's list.
void Builder::link_co_retrieved() {
  std::vector<std::vector<std::uint16_t>> counts(at(pool_.size()));
  for_nodes([&](Node node, int worker) {
    if (listed(node) == 0) return;
    std::vector<std::uint16_t>& count = counts[at(worker)];
    count.resize(at(keys_.rows), 0);
    std::vector<Node> candidates;
    const std::int64_t lists = std::min(listed(node), kListsPerKey);
    for (std::int64_t i = 0; i < lists; ++i) {
      const Node* const list = nearest_.data() + lists_[at(offset_[at(node)] + i)] * per_query_;
      for (std::int64_t rank = 0; rank < per_query_; ++rank)
        if (count[at(list[rank])]++ == 0) candidates.push_back(list[rank]);
    }
    const auto most = static_cast<std::ptrdiff_t>(candidates_for(degree_));
    std::vector<std::uint64_t> order;  // in how many of the lists, then the node: the earlier one is more
    for (const Node c : candidates)
      order.push_back(std::uint64_t{std::exchange(count[at(c)], 0)} << 32 | ~static_cast<std::uint32_t>(c));
    if (std::ssize(order) > most) {
      std::nth_element(order.begin(), order.begin() + most, order.end(), std::greater<>());
      order.resize(at(most));
    }
    candidates.clear();
    for (const std::uint64_t one : order)
      candidates.push_back(static_cast<Node>(~static_cast<std::uint32_t>(one)));
    links_[at(node)] = pruned(node, candidates, forward_, false);
  });
}

/// Adds to every node's links the nodes that link to it by `from`, pruned to the degree.
void Builder::add_reverse(const Lists& from) {
  Lists into(links_.size());
  for (std::size_t x = 0; x < from.size(); ++x)
    for (const Node target : from[x]) into[at(target)].push_back(static_cast<Node>(x));
  Lists merged(links_.size());
  for_nodes([&](Node node, int) {
    std::vector<Node> all = links_[at(node)];
    all.insert(all.end(), into[at(node)].begin(), into[at(node)].end());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    const bool fits = std::ssize(all) <= degree_ || into[at(node)].empty();
    merged[at(node)] = fits ? std::move(all) : pruned(node, all, degree_, true);
  });
  links_ = std::move(merged);
}

/// Links keys in no list to what a walk towards them finds among the others.
void Builder::link_unlisted(std::vector<Node>& rows) {
  std::vector<Node> unlisted;
  for (Node node = 0; node < keys_.rows; ++node)
    if (listed(node) == 0) unlisted.push_back(node);
  const std::int64_t each = candidates_for(degree_);
  std::vector<Node> near;
  if (!unlisted.empty()) near = near_by_walks(unlisted, rows, each);
  if (linker_ != nullptr) {
    if (!unlisted.empty()) rows = linker_->link_near(unlisted, near, each);
    return;
  }
  Lists found(links_.size());
  pool_.for_each(std::ssize(unlisted), [&](std::int64_t i, int) {
    check_cancel();
    const std::span<const Node> own = std::span(near).subspan(at(i * each), at(each));
    const auto count = std::find(own.begin(), own.end(), -1) - own.begin();
    found[at(unlisted[at(i)])] = pruned(unlisted[at(i)], own.first(at(count)), forward_, false);
  });
  for (const Node node : unlisted) links_[at(node)] = found[at(node)];
  add_reverse(found);  // which also puts the links of the others in order
  rows = rows_of(links_);
}

/// What walks towards nodes over the graph of `rows` find: [nodes, each], -1 behind the last.
std::vector<Node> Builder::near_by_walks(std::span<const Node> nodes, const std::vector<Node>& rows,
                                         std::int64_t each) const {
  const KeyGraph graph(degree_, rows, entries(), coded_, pool_);
  std::vector<float> towards(nodes.size() * at(keys_.cols));
  for (std::size_t i = 0; i < nodes.size(); ++i)
    std::ranges::copy(keys_[nodes[i]], towards.begin() + static_cast<std::ptrdiff_t>(i) * keys_.cols);
  const Wanted of = {{towards.data(), std::ssize(nodes), keys_.cols}, {}};
  std::unique_ptr<QueryWalks> walks;
  if (device_ != nullptr && each <= QueryWalks::kKeep) walks = device_->walks(of, coded_, graph);
  if (walks == nullptr) walks = host_walks(of, coded_, pool_);
  walks->enter(graph);
  return walks->best(kWalkBeam, each);
}

/// The keys that stand in most lists.
std::vector<Node> Builder::entries() const {
  std::vector<Node> order(links_.size());
  std::iota(order.begin(), order.end(), 0);
  const std::size_t count = std::min(KeyGraph::kEntries, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                    [&](Node a, Node b) { return listed(a) != listed(b) ? listed(a) > listed(b) : a < b; });
  order.resize(count);
  return order;
}

}  // namespace

std::vector<float> stand_in_queries(Matrix<const float> keys) {
  const std::int64_t count = std::min(keys.rows, kStandIns);
  std::vector<double> mean(static_cast<std::size_t>(keys.cols), 0.0);
  for (std::int64_t x = 0; x < keys.rows; ++x)
    for (std::size_t j = 0; j < mean.size(); ++j)
      mean[j] += static_cast<double>(keys[x][j]) / static_cast<double>(keys.rows);
  std::vector<float> queries;
  for (std::int64_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j < mean.size(); ++j)
      queries.push_back(keys[i * keys.rows / count][j] - static_cast<float>(mean[j]));
  return queries;
}

KeyGraph build_graph(Matrix<const float> keys, Matrix<const float> queries, const BeamKeys& coded, int degree,
                     ThreadPool& pool, bool tune, GraphDevice* device) {
  LODE_ASSERT(keys.stride == keys.cols && queries.stride == queries.cols && keys.cols == coded.d);
  LODE_ASSERT(queries.rows > 0 || keys.rows == 0);
  if (keys.rows == 0) return KeyGraph(degree);
  AskedKeys told(queries.cols), others(queries.cols);
  const bool judged = tune && queries.rows >= kLeastTold && keys.rows >= kLeastTuned;
  // An odd step: the queries of a group's heads take turns, and all heads are to judge.
  const std::int64_t step = std::max<std::int64_t>(9, queries.rows / kJudges | 1);
  for (std::int64_t q = 0; q < queries.rows; ++q) {
    std::vector<float>& to = (judged && q % step == step / 2 ? others : told).queries;
    to.insert(to.end(), queries[q].begin(), queries[q].end());
  }
  for (AskedKeys* const asked : {&told, &others})
    asked->nearest = device != nullptr ? device->nearest(asked->matrix(), keys, per_query_of(keys))
                                       : nearest_keys(asked->matrix(), keys, per_query_of(keys), pool);
  return Builder(keys, told, coded, degree, pool, device).build(others);
}

std::vector<std::int32_t> prune(Matrix<const float> rows, std::span<const float> distance, std::int64_t most,
                                bool fill) {
  const std::int64_t count = rows.rows;
  const KvRows kv = {.type = DType::f32,
                     .k = reinterpret_cast<const std::byte*>(rows.data),
                     .rows = count,
                     .d = static_cast<int>(rows.cols)};
  std::vector<float> products(static_cast<std::size_t>(count)), squares(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    squares[static_cast<std::size_t>(i)] = kernels().dot(rows[i].data(), rows[i].data(), rows.cols);
  std::vector<bool> occluded(static_cast<std::size_t>(count), false);
  std::vector<std::int32_t> kept, others;
  for (std::int64_t i = 0; i < count && std::ssize(kept) < most; ++i) {
    const auto own = static_cast<std::size_t>(i);
    if (occluded[own]) {
      others.push_back(static_cast<std::int32_t>(i));
      continue;
    }
    kept.push_back(static_cast<std::int32_t>(i));
    kernels().score_run(rows[i].data(), 1, kv, i + 1, count, products.data() + i + 1, count);
    for (std::size_t j = own + 1; j < static_cast<std::size_t>(count); ++j)
      if (squares[own] + squares[j] - 2 * products[j] < distance[j]) occluded[j] = true;
  }
  for (std::size_t i = 0; fill && i < others.size() && std::ssize(kept) < most; ++i)
    kept.push_back(others[i]);
  return kept;
}

}  // namespace lode
