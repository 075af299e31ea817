// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/query_walks.h"

#include <algorithm>
#include <atomic>

#include "ann/graph/beam_search.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kQueriesPerItem = 16;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

class HostWalks final : public QueryWalks {
 public:
  HostWalks(const Wanted& of, const BeamKeys& keys, ThreadPool& pool)
      : of_(of), each_(of.each()), keys_(keys), pool_(pool), workers_(at(pool.size())) {
    LODE_ASSERT(each_ <= kMostWanted);
  }

  void enter(const KeyGraph& graph) override {
    graph_ = &graph;
    for (Worker& worker : workers_) worker.marked.resize(at(graph.nodes()), false);
  }

  void watch(std::int64_t beam, std::vector<std::uint32_t>& visits,
             std::vector<std::uint32_t>& uses) override {
    visits.assign(at(graph_->nodes()), 0);
    uses.assign(graph_->rows().size(), 0);
    const auto count = [](std::uint32_t& counter) {
      std::atomic_ref(counter).fetch_add(1, std::memory_order_relaxed);
    };
    for_walks(beam, kKeep, [&](std::int64_t q, Worker& worker) {
      for (const Node key : wanted(q)) worker.marked[at(key)] = true;
      for (std::int64_t rank = 0; rank < std::min(beam, worker.walk.found()); ++rank) {
        const Node node = worker.walk.node(rank);
        count(visits[at(node)]);
        const std::span<const Link> links = graph_->links(node);
        for (std::size_t i = 0; i < links.size(); ++i)
          if (worker.marked[at(target_of(links[i]))]) count(uses[at(node) * at(graph_->degree()) + i]);
      }
      for (const Node key : wanted(q)) worker.marked[at(key)] = false;
    });
  }

  std::vector<std::uint64_t> found(std::int64_t beam) override {
    std::vector<std::uint64_t> found(at(of_.queries.rows), 0);
    for_walks(beam, kKeep, [&](std::int64_t q, Worker& worker) {
      const auto mark = [&](bool as) {
        for (std::int64_t rank = 0; rank < worker.walk.found(); ++rank)
          worker.marked[at(worker.walk.node(rank))] = as;
      };
      mark(true);
      for (std::int64_t rank = 0; rank < each_; ++rank)
        if (worker.marked[at(wanted(q)[at(rank)])]) found[at(q)] |= std::uint64_t{1} << rank;
      mark(false);
    });
    return found;
  }

  std::vector<Node> best(std::int64_t beam, std::int64_t keep) override {
    std::vector<Node> best(at(of_.queries.rows * keep), -1);
    for_walks(beam, keep, [&](std::int64_t q, Worker& worker) {
      for (std::int64_t rank = 0; rank < worker.walk.found(); ++rank)
        best[at(q * keep + rank)] = worker.walk.node(rank);
    });
    return best;
  }

  std::vector<Node> offers(std::span<const std::uint64_t> found, std::span<const MissedKey> missed) override {
    std::vector<Node> offers(missed.size() * kOffers, -1);
    pool_.for_each(std::ssize(missed), [&](std::int64_t i, int) {
      const MissedKey& m = missed[at(i)];
      std::vector<Node> from;
      for (std::int64_t rank = 0; rank < each_; ++rank)
        if ((found[at(m.query)] >> rank & 1) != 0) from.push_back(wanted(m.query)[at(rank)]);
      sort_by_distance(wanted(m.query)[at(m.rank)], from, keys_);
      std::copy_n(from.begin(), std::min(from.size(), kOffers), offers.begin() + i * std::int64_t{kOffers});
    });
    return offers;
  }

 private:
  struct Worker {
    BeamSearch walk;
    std::vector<bool> marked;  // [nodes] false between queries
  };

  std::span<const Node> wanted(std::int64_t query) const {
    return of_.nearest.subspan(at(query * each_), at(each_));
  }

  /// body(query, worker) for all queries, whose walks have run.
  template <class Body>
  void for_walks(std::int64_t beam, std::int64_t keep, const Body& body) {
    const std::int64_t count = of_.queries.rows;
    pool_.for_each((count + kQueriesPerItem - 1) / kQueriesPerItem, [&](std::int64_t item, int number) {
      check_cancel();
      Worker& worker = workers_[at(number)];
      for (std::int64_t q = item * kQueriesPerItem; q < std::min(count, (item + 1) * kQueriesPerItem); ++q) {
        worker.walk.begin(*graph_, keys_, of_.queries[q].data(), keep);
        worker.walk.visit(graph_->entries());
        worker.walk.run(beam);
        body(q, worker);
      }
    });
  }

  const Wanted of_;
  std::int64_t each_;
  const BeamKeys keys_;
  ThreadPool& pool_;
  std::vector<Worker> workers_;
  const KeyGraph* graph_ = nullptr;
};

}  // namespace

std::unique_ptr<QueryWalks> host_walks(const Wanted& of, const BeamKeys& keys, ThreadPool& pool) {
  return std::make_unique<HostWalks>(of, keys, pool);
}

}  // namespace lode
