// SPDX-License-Identifier: Apache-2.0
// ivf and hnsw, the vector-search baselines, against exact search and their definitions.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "support/damaged_index.h"
#include "support/forged_index.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

/// Far keys of one query by falling product in float64, ties to the newer.
std::vector<Position> by_product(const World& world, const QueryBlock& block, const LayerGeometry& geometry,
                                 std::int64_t t, int query_head) {
  const float* q = block.q.data() + (t * geometry.query_heads + query_head) * geometry.head_dim;
  std::vector<std::pair<double, Position>> order;
  for (Position p = block.far_begin; p < block.far_end(t, geometry.dense); ++p) {
    const std::vector<float> k = world.key(p, query_head / geometry.group());
    double dot = 0;
    for (std::size_t i = 0; i < k.size(); ++i) dot += static_cast<double>(q[i]) * k[i];
    order.emplace_back(dot, p);
  }
  std::sort(order.begin(), order.end(), std::greater<>());
  std::vector<Position> rows;
  for (const auto& [dot, row] : order) rows.push_back(row);
  return rows;
}

double recall(const FarSet& found, const std::vector<Position>& order, std::size_t k) {
  std::size_t hits = 0;
  for (std::size_t i = 0; i < k; ++i) hits += found.contains({order[i], 0.0f});
  return static_cast<double>(hits) / static_cast<double>(k);
}

// Which lists there are is read from the saved index; the rest is the definition: best lists, best keys in
// them.
TEST(Ivf, TakesTheBestKeysOfTheBestLists) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {2, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(300);
  const auto selector = make("ivf:nlist=12,nprobe=3,k=15", geometry);
  selector->build(0, world.store().layer(0));
  const auto sections = saved_sections(*selector);
  std::vector<float> centroids;  // [Hkv, 12, 32]
  for (const auto& [name, bytes] : sections) {
    if (!name.ends_with("centroids")) continue;
    centroids.resize(bytes.size() / 4);
    std::memcpy(centroids.data(), bytes.data(), bytes.size());
  }
  ASSERT_EQ(centroids.size(), 2u * 12 * 32);
  world.write(30);
  const QueryBlock block = world.block(326, 4);
  const auto found = select(*selector, block, geometry);
  const auto product = [&](const float* x, int head, int list) {
    double dot = 0;
    for (int i = 0; i < 32; ++i)
      dot += static_cast<double>(x[i]) * centroids[static_cast<std::size_t>((head * 12 + list) * 32 + i)];
    return dot;
  };
  for (std::int64_t t = 0; t < 4; ++t) {
    for (int h = 0; h < 4; ++h) {
      const auto best_first = [&](const float* x) {
        std::vector<int> order(12);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](int a, int b) { return product(x, h / 2, a) > product(x, h / 2, b); });
        return order;
      };
      const std::vector<int> probed = best_first(block.q.data() + (t * 4 + h) * 32);
      FarSet expected;
      for (const Position row : by_product(world, block, geometry, t, h)) {
        const std::vector<float> key = world.key(row, h / 2);
        const int list = best_first(key.data())[0];
        if (expected.size() < 15 && std::find(probed.begin(), probed.begin() + 3, list) != probed.begin() + 3)
          expected.emplace(row, 0.0f);
      }
      EXPECT_EQ(found[static_cast<std::size_t>(t * 4 + h)], expected) << t << " " << h;
    }
  }
}

TEST(Ivf, AllListsAreExactSearch) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 32, .type = DType::f16, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(400);
  const auto ivf = make("ivf:nprobe=1048576,k=20", geometry), exact = make("topk:k=20", geometry);
  for (Selector* s : {ivf.get(), exact.get()}) s->build(0, world.store().layer(0));
  SelectWork work;
  EXPECT_EQ(select(*ivf, world.block(399, 1), geometry, &work),
            select(*exact, world.block(399, 1), geometry));
  const std::int64_t lists = 399 / 39;
  EXPECT_EQ(work.keys_scored, lists + 2 * 383);
  EXPECT_EQ(work.bytes, lists * 32 * 4 + 2 * 383 * (32 * 2 + 4));
}

TEST(HnswSelector, FindsWhatExactSearchFinds) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {1, 16}});
  plant_topics(world, 40, 0.5f);
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  const auto selector = make("hnsw:k=20,ef=60", geometry);
  selector->build(0, world.store().layer(0));
  double sum = 0;
  for (int which = 0; which < 10; ++which) {
    const TopicQuery query(world, 2999, which);
    SelectWork work;
    const auto found = select(*selector, query.block, geometry, &work);
    for (int h = 0; h < 4; ++h) {
      EXPECT_EQ(found[static_cast<std::size_t>(h)].size(), 20u);
      sum += recall(found[static_cast<std::size_t>(h)], by_product(world, query.block, geometry, 0, h), 20);
    }
    EXPECT_LT(work.keys_scored, 4 * 1500);
    EXPECT_GE(work.bytes, work.keys_scored * 32 * 4);
  }
  EXPECT_GT(sum / 40, 0.9);
}

// Small graphs are held whole by a large ef: then the search is exact, so no node has been lost.
TEST(HnswSelector, LargeBeamsAreExactSearch) {
  ThreadPool pool(2);
  for (const char* spec : {"hnsw:M=16,k=20,ef=100000", "hnsw:M=8,ef_construction=40,k=20,ef=100000"}) {
    World world({.kv_heads = 1, .group = 2, .d = 32, .type = DType::bf16, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(300);
    const auto hnsw = make(spec, geometry), exact = make("topk:k=20", geometry);
    for (Selector* s : {hnsw.get(), exact.get()}) s->build(0, world.store().layer(0));
    const auto found = select(*hnsw, world.block(299, 1), geometry),
               expected = select(*exact, world.block(299, 1), geometry);
    for (std::size_t h = 0; h < 2; ++h) {
      std::size_t both = 0;
      for (const auto& key : found[h]) both += expected[h].count(key);
      EXPECT_GE(both, 19u) << spec;
    }
  }
}

// Keys that join in batches make the graph that building it whole makes, and cutting it back leaves no trace.
TEST(HnswSelector, GrownAndCutEqualsRebuilt) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 1, .d = 32, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "hnsw:M=5,ef_construction=20,k=7";
  world.write(17 + 64);
  const auto grown = make(spec, geometry);
  grown->build(0, world.store().layer(0));
  Rng rng(3);
  while (world.tokens() < 17 + 64 * 6) {
    world.write(1);
    select(*grown, world.block(static_cast<Position>(world.tokens() - 1), 1), geometry);
    if (rng.below(60) != 0) continue;
    const std::int64_t cut =
        17 + 64 + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(world.tokens() - 80)));
    world.store().roll_back(cut);
    grown->roll_back(0, cut);
  }
  const auto rebuilt = make(spec, geometry);
  rebuilt->build(0, world.store().layer(0));
  const auto last = static_cast<Position>(world.tokens() - 1);
  EXPECT_EQ(select(*grown, world.block(last, 1), geometry), select(*rebuilt, world.block(last, 1), geometry));
  // Below what was built: the graph is made anew from what is left.
  world.store().roll_back(60);
  grown->roll_back(0, 60);
  EXPECT_EQ(select(*grown, world.block(59, 1), geometry).size(), 2u);
}

TEST(VectorSearch, DamagedIndexesAreRefused) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 1, .d = 32, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  const KvLayer kv = world.store().layer(0);
  const auto selector = make("hnsw:M=4", geometry);
  selector->build(0, kv);
  const IndexSections good = saved_sections(*selector);
  const DamagedIndex refused(*selector, good, kv);
  refused("KV heads", "shape", 0, number(1));
  refused("M and ef_construction", "shape", 8, number(5));
  refused("behind the sink", "shape", 24, number(0));
  refused("within the context", "shape", 32, number(200));
  refused("within the context", "shape", 40, number(2));
  refused("sizes", "shape", 32, number(100));
  refused("same seed", "shape", 48, number(0));
  refused("other nodes", "ground", 0, std::string("\x00\x00\x00\x00", 4));
  refused("other nodes", "ground", 0, std::string("\x00\x00\x00\x7f", 4));
  refused("other nodes", "ground", 0, std::string("\xfe\xff\xff\xff", 4));
  refused("sizes", "offsets", 8, number(-1));
  load_sections(*selector, good, kv);
}

TEST(VectorSearch, KeysOutOfRangeAreRefused) {
  for (const char* spec : {"ivf:nprobe=0", "ivf:nlist=-1", "hnsw:M=1", "hnsw:ef=0", "hnsw:ef_construction=0"})
    expect_refused(std::string_view(spec).substr(0, 3), [&] { parse_spec(spec); });
}

}  // namespace
}  // namespace lode::test
