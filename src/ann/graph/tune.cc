// SPDX-License-Identifier: Apache-2.0
// Links are chosen by how keys lie to each other, and most of what walks score is not wanted. Walks for the
// queries that the graph was made of tell which links earn their place: one that leads to a wanted key in
// fewer than a tenth of the walks that follow it goes. That cuts some keys off for some queries; each key
// that such a walk misses is then linked from the nearest wanted key that it found and that has room.
// Queries without structure, or few, tell nothing about others: what is done counts only if other queries,
// kept apart, find as much with the same beam. Measured in docs/results/retrieval.md.
#include "ann/graph/tune.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "ann/graph/beam_search.h"
#include "base/cancel.h"
#include "base/threads.h"

namespace lode {

namespace {

constexpr std::int64_t kKeysPerQuery = 4;
constexpr std::int64_t kWatchedBeam = 150, kMendedBeam = 100, kKeep = 160;
constexpr std::uint32_t kLeastVisits = 8;     // of a node, before its links are judged
constexpr double kLeastUses[] = {0.1, 0.03};  // the second where the first takes too much away
constexpr double kMayLose = 0.005;            // of the keys that the others want
constexpr int kMends = 2;
constexpr std::int64_t kQueriesPerItem = 16;
constexpr std::size_t kOffers = 6;  // nodes that may take a link to a missed key

using Lists = std::vector<std::vector<Node>>;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// A key that a walk missed, and who may link to it, nearest first.
struct Missed {
  Node key;
  std::vector<Node> from;
};

class Tuner {
 public:
  Tuner(const Wanted& of, std::int64_t most, const BeamKeys& keys, ThreadPool& pool)
      : queries_(of.queries),
        nearest_(of.nearest),
        each_(std::ssize(of.nearest) / of.queries.rows),
        used_(std::min(of.queries.rows, most)),
        keys_(keys),
        pool_(pool),
        workers_(at(pool.size())) {}

  void watch(const KeyGraph& graph);
  /// The watched graph without the links of less use, mended.
  KeyGraph tuned(const KeyGraph& graph, double least_use) {
    const std::vector<Node> entries(graph.entries().begin(), graph.entries().end());
    KeyGraph tuned(graph.degree(), useful(graph, least_use), entries, keys_, pool_);
    for (int i = 0; i < kMends; ++i) tuned = KeyGraph(graph.degree(), mended(tuned), entries, keys_, pool_);
    return tuned;
  }
  /// Share of the wanted keys that walks find.
  double found(const KeyGraph& graph);

 private:
  struct Worker {
    BeamSearch walk;
    std::vector<bool> marked;  // [nodes] false between queries
  };

  /// The wanted keys of the used query with this number.
  std::span<const Node> wanted(std::int64_t number) const {
    return nearest_.subspan(at(row(number) * each_), at(each_));
  }
  std::int64_t row(std::int64_t number) const { return number * queries_.rows / used_; }

  /// body(number, worker) for all used queries, whose walks have run.
  template <class Body>
  void for_walks(const KeyGraph& graph, std::int64_t beam, const Body& body) {
    pool_.for_each((used_ + kQueriesPerItem - 1) / kQueriesPerItem, [&](std::int64_t item, int number) {
      check_cancel();
      Worker& worker = workers_[at(number)];
      worker.marked.resize(at(graph.nodes()), false);
      for (std::int64_t q = item * kQueriesPerItem; q < std::min(used_, (item + 1) * kQueriesPerItem); ++q) {
        worker.walk.begin(graph, keys_, queries_[row(q)].data(), kKeep);
        worker.walk.visit(graph.entries());
        worker.walk.run(beam);
        body(q, worker);
      }
    });
  }

  Lists useful(const KeyGraph& graph, double least_use) const;
  Lists mended(const KeyGraph& graph);

  Matrix<const float> queries_;    // [q, m]
  std::span<const Node> nearest_;  // [q, each]
  std::int64_t each_, used_;
  const BeamKeys& keys_;
  ThreadPool& pool_;
  std::vector<Worker> workers_;
  std::vector<std::uint32_t> visits_, uses_;  // [nodes]; [nodes, degree]
};

/// Counts how often nodes are followed, and by which links a wanted key is found.
void Tuner::watch(const KeyGraph& graph) {
  visits_.assign(at(graph.nodes()), 0);
  uses_.assign(graph.rows().size(), 0);
  const auto count = [](std::uint32_t& counter) {
    std::atomic_ref(counter).fetch_add(1, std::memory_order_relaxed);
  };
  for_walks(graph, kWatchedBeam, [&](std::int64_t q, Worker& worker) {
    for (const Node key : wanted(q)) worker.marked[at(key)] = true;
    for (std::int64_t rank = 0; rank < std::min(kWatchedBeam, worker.walk.found()); ++rank) {
      const Node node = worker.walk.node(rank);
      count(visits_[at(node)]);
      const std::span<const Link> links = graph.links(node);
      for (std::size_t i = 0; i < links.size(); ++i)
        if (worker.marked[at(target_of(links[i]))]) count(uses_[at(node) * at(graph.degree()) + i]);
    }
    for (const Node key : wanted(q)) worker.marked[at(key)] = false;
  });
}

/// The links but those that walks follow in vain.
Lists Tuner::useful(const KeyGraph& graph, double least_use) const {
  Lists kept(at(graph.nodes()));
  for (Node node = 0; node < graph.nodes(); ++node) {
    const std::span<const Link> links = graph.links(node);
    const std::uint32_t followed = visits_[at(node)];
    for (std::size_t i = 0; i < links.size(); ++i)
      if (followed < kLeastVisits || uses_[at(node) * at(graph.degree()) + i] >= least_use * followed)
        kept[at(node)].push_back(target_of(links[i]));
  }
  return kept;
}

/// The links, and more to keys that walks miss.
Lists Tuner::mended(const KeyGraph& graph) {
  std::vector<std::vector<Missed>> missed(at(used_));
  for_walks(graph, kMendedBeam, [&](std::int64_t q, Worker& worker) {
    const auto mark = [&](bool as) {
      for (std::int64_t rank = 0; rank < worker.walk.found(); ++rank)
        worker.marked[at(worker.walk.node(rank))] = as;
    };
    mark(true);
    std::vector<Node> found;
    for (const Node key : wanted(q))
      if (worker.marked[at(key)]) found.push_back(key);
    for (const Node key : wanted(q)) {
      if (worker.marked[at(key)]) continue;
      Missed one = {key, found};
      sort_by_distance(key, one.from, keys_);
      one.from.resize(std::min(one.from.size(), kOffers));
      missed[at(q)].push_back(std::move(one));
    }
    mark(false);
  });
  Lists links(at(graph.nodes()));
  for (Node node = 0; node < graph.nodes(); ++node)
    for (const Link link : graph.links(node)) links[at(node)].push_back(target_of(link));
  for (const std::vector<Missed>& of_query : missed) {
    for (const Missed& one : of_query) {
      for (const Node from : one.from) {
        std::vector<Node>& own = links[at(from)];
        const bool known = std::find(own.begin(), own.end(), one.key) != own.end();
        if (!known && std::ssize(own) >= graph.degree()) continue;
        if (!known) own.push_back(one.key);
        break;
      }
    }
  }
  return links;
}

double Tuner::found(const KeyGraph& graph) {
  std::int64_t all = 0;
  for_walks(graph, kMendedBeam, [&](std::int64_t q, Worker& worker) {
    for (const Node key : wanted(q)) worker.marked[at(key)] = true;
    std::int64_t hits = 0;
    for (std::int64_t rank = 0; rank < worker.walk.found(); ++rank)
      hits += worker.marked[at(worker.walk.node(rank))] ? 1 : 0;
    for (const Node key : wanted(q)) worker.marked[at(key)] = false;
    std::atomic_ref(all).fetch_add(hits, std::memory_order_relaxed);
  });
  return static_cast<double>(all) / static_cast<double>(used_ * each_);
}

}  // namespace

KeyGraph tune_graph(const KeyGraph& graph, const Wanted& known, const Wanted& others, const BeamKeys& keys,
                    ThreadPool& pool) {
  const std::int64_t most = graph.nodes() / kKeysPerQuery;
  if (most == 0 || known.queries.rows == 0 || others.queries.rows == 0) return graph;
  Tuner tuner(known, most, keys, pool), judge(others, others.queries.rows, keys, pool);
  tuner.watch(graph);
  const double enough = judge.found(graph) - kMayLose;
  for (const double least_use : kLeastUses)
    if (KeyGraph tuned = tuner.tuned(graph, least_use); judge.found(tuned) >= enough) return tuned;
  return graph;
}

}  // namespace lode
