// SPDX-License-Identifier: Apache-2.0
// Links are chosen by how keys lie to each other, and most of what walks score is not wanted. Walks for the
// queries that the graph was made of tell which links earn their place: one that leads to a wanted key in
// fewer than a tenth of the walks that follow it goes. That cuts some keys off for some queries; each key
// that such a walk misses is then linked from the nearest wanted key that it found and that has room.
// Queries without structure, or few, tell nothing about others: what is done counts only if other queries,
// kept apart, find as much with the same beam, and is not tried where they find less than half. Measured in
// docs/results/retrieval.md.
#include "ann/graph/tune.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "ann/graph/graph_device.h"
#include "base/threads.h"

namespace lode {

namespace {

constexpr std::int64_t kKeysPerQuery = 4;
constexpr std::int64_t kWatchedBeam = QueryWalks::kMostBeam, kMendedBeam = 100;
constexpr std::uint32_t kLeastVisits = 8;     // of a node, before its links are judged
constexpr double kLeastUses[] = {0.1, 0.03};  // the second where the first takes too much away
constexpr double kMayLose = 0.005;            // of the keys that the others want
constexpr double kLeastFound = 0.5;           // of them: walks that find less tell nothing about links
constexpr int kMends = 2;
constexpr std::size_t kOffers = QueryWalks::kOffers;  // nodes that may take a link to a missed key

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// At most so many queries, at even steps.
struct SomeQueries {
  SomeQueries(const Wanted& of, std::int64_t most) : each(of.each()), width(of.queries.cols) {
    const std::int64_t count = std::min(of.queries.rows, most);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = i * of.queries.rows / count;
      queries.insert(queries.end(), of.queries[row].begin(), of.queries[row].end());
      const std::span<const Node> own = of.nearest.subspan(at(row * each), at(each));
      nearest.insert(nearest.end(), own.begin(), own.end());
    }
  }
  Wanted wanted() const { return {{queries.data(), std::ssize(queries) / width, width}, nearest}; }
  Node key(const MissedKey& missed) const { return nearest[at(missed.query * each + missed.rank)]; }

  std::int64_t each, width;
  std::vector<float> queries;  // [q, m]
  std::vector<Node> nearest;   // [q, each]
};

class Tuner {
 public:
  Tuner(const Wanted& of, std::int64_t most, const BeamKeys& keys, const KeyGraph& graph, ThreadPool& pool,
        GraphDevice* device)
      : of_(of, most), keys_(keys), pool_(pool) {
    if (device != nullptr) walks_ = device->walks(of_.wanted(), keys, graph);
    if (walks_ == nullptr) walks_ = host_walks(of_.wanted(), keys, pool);
  }

  /// Counts how often nodes are followed, and by which links a wanted key is found.
  void watch(const KeyGraph& graph) {
    walks_->enter(graph);
    walks_->watch(kWatchedBeam, visits_, uses_);
  }
  /// The watched graph without the links of less use, mended.
  KeyGraph tuned(const KeyGraph& graph, double least_use) {
    const std::vector<Node> entries(graph.entries().begin(), graph.entries().end());
    KeyGraph tuned(graph.degree(), useful(graph, least_use), entries, keys_, pool_);
    for (int i = 0; i < kMends; ++i) tuned = KeyGraph(graph.degree(), mended(tuned), entries, keys_, pool_);
    return tuned;
  }
  /// Share of the wanted keys that walks find.
  double found(const KeyGraph& graph) {
    walks_->enter(graph);
    std::int64_t all = 0;
    for (const std::uint64_t found : walks_->found(kMendedBeam)) all += std::popcount(found);
    return static_cast<double>(all) / static_cast<double>(of_.nearest.size());
  }

 private:
  std::vector<Node> useful(const KeyGraph& graph, double least_use) const;
  std::vector<Node> mended(const KeyGraph& graph);

  const SomeQueries of_;
  const BeamKeys& keys_;
  ThreadPool& pool_;
  std::unique_ptr<QueryWalks> walks_;
  std::vector<std::uint32_t> visits_, uses_;  // [nodes]; [nodes, degree]
};

/// The links but those that walks follow in vain, as KeyGraph takes them.
std::vector<Node> Tuner::useful(const KeyGraph& graph, double least_use) const {
  std::vector<Node> kept(graph.rows().size(), -1);
  pool_.for_each(graph.nodes(), [&](std::int64_t node, int) {
    const std::span<const Link> links = graph.links(static_cast<Node>(node));
    const std::uint32_t followed = visits_[at(node)];
    Node* to = kept.data() + node * graph.degree();
    for (std::size_t i = 0; i < links.size(); ++i)
      if (followed < kLeastVisits || uses_[at(node * graph.degree()) + i] >= least_use * followed)
        *to++ = target_of(links[i]);
  });
  return kept;
}

/// The links, and more to keys that walks miss.
std::vector<Node> Tuner::mended(const KeyGraph& graph) {
  walks_->enter(graph);
  const std::vector<std::uint64_t> found = walks_->found(kMendedBeam);
  std::vector<MissedKey> missed;
  for (std::size_t q = 0; q < found.size(); ++q) {
    for (std::int64_t rank = 0; rank < of_.each; ++rank)
      if ((found[q] >> rank & 1) == 0)
        missed.push_back({static_cast<std::int32_t>(q), static_cast<std::int32_t>(rank)});
  }
  const std::vector<Node> offers = walks_->offers(found, missed);
  std::vector<Node> links;
  for (const Link link : graph.rows()) links.push_back(link == kNoLink ? -1 : target_of(link));
  for (std::size_t i = 0; i < missed.size(); ++i) {
    const Node key = of_.key(missed[i]);
    for (const Node from : std::span(offers).subspan(i * kOffers, kOffers)) {
      if (from < 0) break;
      const std::span<Node> own = std::span(links).subspan(at(from) * at(graph.degree()), at(graph.degree()));
      const auto place = std::ranges::find_if(own, [&](Node node) { return node == key || node < 0; });
      if (place == own.end()) continue;
      *place = key;
      break;
    }
  }
  return links;
}

}  // namespace

KeyGraph tune_graph(const KeyGraph& graph, const Wanted& known, const Wanted& others, const BeamKeys& keys,
                    ThreadPool& pool, GraphDevice* device) {
  const std::int64_t most = graph.nodes() / kKeysPerQuery;
  if (most == 0 || known.queries.rows == 0 || others.queries.rows == 0) return graph;
  Tuner judge(others, others.queries.rows, keys, graph, pool, device);
  const double found = judge.found(graph), enough = found - kMayLose;
  if (found < kLeastFound) return graph;
  Tuner tuner(known, most, keys, graph, pool, device);
  tuner.watch(graph);
  for (const double least_use : kLeastUses)
    if (KeyGraph tuned = tuner.tuned(graph, least_use); judge.found(tuned) >= enough) return tuned;
  return graph;
}

}  // namespace lode
