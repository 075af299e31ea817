// SPDX-License-Identifier: Apache-2.0
// Graphs that grow by many more keys than they were built of find what exact search finds nearly as often
// as graphs that were built of all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ann/nearest.h"
#include "base/rng.h"
#include "base/threads.h"
#include "select/retrieval/graphs_by_device.h"
#include "select/retrieval/index.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr std::int64_t kAsked = 256;  // tokens that search, each with two heads

double shared(const std::vector<FarSet>& found, const std::vector<FarSet>& exact) {
  double hits = 0, all = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    for (const auto& row : exact[i]) hits += found[i].contains(row) ? 1 : 0;
    all += static_cast<double>(exact[i].size());
  }
  return hits / all;
}

WorldShape shape_of(std::int64_t tokens) {
  return {.kv_heads = 1, .group = 2, .d = 32, .type = DType::f16, .dense = {4, 32}, .max_tokens = tokens};
}

/// Of the ten best keys of the last tokens' queries, the share that is found in a text of `tokens`.
struct Recall {
  double grown = 0, rebuilt = 0;  // over the first `built` keys, the others came later; over all

  Recall(std::int64_t built, std::int64_t tokens) {
    constexpr const char* kSpec = "retrieval:k=10,beam=64,warm=off";
    ThreadPool pool(2);
    World world(shape_of(tokens));
    plant_topics(world, 23, 0.6f);
    const LayerGeometry geometry = world.geometry(pool);
    const auto exact = make("topk:k=10", geometry), growing = make(kSpec, geometry),
               whole = make(kSpec, geometry);
    world.write(built);
    tell(*growing, world, built);
    growing->build(0, world.store().layer(0));
    world.write(tokens - built);
    tell(*whole, world, tokens);
    whole->build(0, world.store().layer(0));
    const QueryBlock block = world.block(static_cast<Position>(tokens - kAsked), kAsked);
    const std::vector<FarSet> best = select(*exact, block, geometry);
    grown = shared(select(*growing, block, geometry), best);
    rebuilt = shared(select(*whole, block, geometry), best);
  }
};

/// How many keys a graph was built of, how many there are in the end, and what recall growth may cost: a
/// point more than it does.
struct Growth {
  std::int64_t built, tokens;
  double margin;
};

TEST(RetrievalGrowth, AFewThousandKeysMoreAreFoundAsIfTheyHadBeenThere) {
  for (const auto& [built, tokens, margin] : {Growth{2400, 3000, 0.025}, Growth{500, 3000, 0.04}}) {
    const Recall recall(built, tokens);
    EXPECT_GE(recall.grown, recall.rebuilt - margin)
        << built << ": " << recall.grown << ", " << recall.rebuilt;
  }
}

/// Keys in groups, and queries on the other side of the origin that each want the longest keys towards some
/// groups.
class ForeignQueries {
 public:
  static constexpr std::int64_t kDim = 32, kQueries = 40960, kAsked = 600, kBest = 10;

  explicit ForeignQueries(std::int64_t keys) {
    Rng rng(1);
    for (float& x : centres_) x = static_cast<float>(rng.normal());
    keys_ = drawn(rng, keys, 2.0f);
    queries_ = drawn(rng, std::min(kQueries, 2 * keys), -1.0f);
    asked_ = drawn(rng, kAsked, -1.0f);
    nearest_ = nearest_keys(matrix(asked_), matrix(keys_), kBest, pool_);
  }

  std::vector<float>& keys() { return keys_; }
  std::int64_t queries() const { return matrix(queries_).rows; }
  KvRows rows() const {
    return {.type = DType::f32,
            .k = reinterpret_cast<const std::byte*>(keys_.data()),
            .rows = matrix(keys_).rows,
            .d = static_cast<int>(kDim)};
  }
  /// Over the first `built` keys.
  RetrievalIndex built(std::int64_t built) {
    GraphsByDevice host(nullptr, pool_);
    return this->built(built, host);
  }
  RetrievalIndex built(std::int64_t built, GraphDevice& device) {
    const std::int64_t told = std::min(matrix(queries_).rows, 2 * built);
    const std::vector<float> queries(queries_.begin(), queries_.begin() + told * kDim);
    const auto end = static_cast<Position>(built);
    return {kShape,    rows(), end,   RetrievalIndex::space_for(kShape, rows(), end, queries),
            {queries}, {},     pool_, device};
  }
  /// Share of the best keys that walks with this beam find when all but the first `first` keys came later.
  double found(std::int64_t first, std::int64_t beam) {
    RetrievalIndex index = built(first);
    RetrievalScratch scratch;
    index.advance(rows().rows, rows(), scratch);
    return recall(index, beam);
  }

 private:
  static constexpr std::int64_t kGroups = 40;
  static constexpr RetrievalIndex::Shape kShape = {.head_dim = kDim, .degree = 24};

  static Matrix<const float> matrix(const std::vector<float>& x) {
    return {x.data(), std::ssize(x) / kDim, kDim};
  }
  std::vector<float> drawn(Rng& rng, std::int64_t count, float offset) const {
    std::vector<float> out;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::size_t group = rng.below(kGroups) * std::size_t{kDim};
      for (std::size_t j = 0; j < std::size_t{kDim}; ++j)
        out.push_back(centres_[group + j] + 0.7f * static_cast<float>(rng.normal()) + offset);
    }
    return out;
  }
  double recall(const RetrievalIndex& index, std::int64_t beam) const {
    BeamSearch walk;
    std::vector<float> towards(static_cast<std::size_t>(index.space().numbers()));
    double hits = 0;
    for (std::int64_t q = 0; q < kAsked; ++q) {
      index.space().query(matrix(asked_)[q].data(), towards);
      walk.begin(index.graph(0), index.walk_keys(), towards.data(), beam);
      walk.visit(index.graph(0).entries());
      walk.run(beam);
      for (std::int64_t rank = 0; rank < std::min(2 * kBest, walk.found()); ++rank)
        hits += std::count(nearest_.begin() + q * kBest, nearest_.begin() + (q + 1) * kBest, walk.node(rank));
    }
    return hits / static_cast<double>(kAsked * kBest);
  }

  ThreadPool pool_ = ThreadPool(2);
  std::vector<float> centres_ = std::vector<float>(kGroups * kDim), keys_, queries_, asked_;  // [.., d]
  std::vector<std::int32_t> nearest_;                                                         // [asked, 10]
};

TEST(RetrievalGrowth, ForeignQueriesFindKeysThatCameLater) {
  ForeignQueries world(12000);
  const double grown = world.found(4000, 32), whole = world.found(12000, 32);
  EXPECT_GE(whole, 0.95);
  EXPECT_GE(grown, whole - 0.03);
}

TEST(RetrievalGrowth, KeysThatWereTakenBackLeaveNothingBehind) {
  constexpr std::int64_t kBuilt = 600, kKeys = 3000;
  ForeignQueries world(kKeys);
  RetrievalIndex once = world.built(kBuilt), twice = world.built(kBuilt);
  RetrievalScratch scratch;
  once.advance(kKeys, world.rows(), scratch);
  const std::vector<float> kept = world.keys();
  std::reverse(world.keys().begin() + kBuilt * ForeignQueries::kDim, world.keys().end());
  twice.advance(kKeys, world.rows(), scratch);
  twice.settle();
  world.keys() = kept;
  twice.advance(kKeys, world.rows(), scratch);
  EXPECT_TRUE(std::ranges::equal(twice.graph(0).rows(), once.graph(0).rows()));
}

/// Finds nearest keys, and counts for how many queries.
class CountingDevice final : public GraphDevice {
 public:
  std::vector<Node> nearest(Matrix<const float> queries, Matrix<const float> keys, std::int64_t k) override {
    asked += queries.rows;
    return nearest_keys(queries, keys, k, pool_);
  }
  std::unique_ptr<GraphLinker> linker(Matrix<const float>, std::span<const Node>, std::int64_t,
                                      int) override {
    return nullptr;
  }
  std::unique_ptr<QueryWalks> walks(const Wanted&, const BeamKeys&, const KeyGraph&) override {
    return nullptr;
  }
  std::int64_t asked = 0;

 private:
  ThreadPool pool_ = ThreadPool(2);
};

TEST(RetrievalGrowth, ADeviceFindsTheListsOfAllQueries) {
  constexpr std::int64_t kKeys = 3000;
  ForeignQueries world(kKeys);
  CountingDevice device;
  const RetrievalIndex index = world.built(kKeys, device);
  const std::int64_t guides = std::ssize(index.guides(0).floors);
  EXPECT_GT(guides, 100);
  EXPECT_EQ(device.asked, world.queries() + guides);
}

// Some minutes; ./check --long runs it.
TEST(RetrievalGrowth, DISABLED_AHundredThousandKeysMoreAreFound) {
  ForeignQueries world(130000);
  const double grown = world.found(30000, 64), whole = world.found(130000, 64);
  EXPECT_GE(whole, 0.98);
  EXPECT_GE(grown, whole - 0.03);
}

}  // namespace
}  // namespace lode::test
