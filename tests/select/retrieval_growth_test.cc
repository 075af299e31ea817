// SPDX-License-Identifier: Apache-2.0
// Graphs that grow by many more keys than they were built of find what exact search finds nearly as often as graphs that
// were built of all of them.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr std::int64_t kAsked = 128;  // tokens that search, each with two heads

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

/// How many keys a graph was built of, how many there are in the end, and what recall growth may cost: a point more
/// than it does.
struct Growth {
  std::int64_t built, tokens;
  double margin;
};

TEST(RetrievalGrowth, AFewThousandKeysMoreAreFoundAsIfTheyHadBeenThere) {
  for (const auto& [built, tokens, margin] : {Growth{2400, 3000, 0.04}, Growth{500, 3000, 0.09}}) {
    const Recall recall(built, tokens);
    EXPECT_GE(recall.grown, recall.rebuilt - margin)
        << built << ": " << recall.grown << ", " << recall.rebuilt;
  }
}

}  // namespace
}  // namespace lode::test
