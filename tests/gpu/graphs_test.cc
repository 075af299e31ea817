// SPDX-License-Identifier: Apache-2.0
// What a GPU does of a graph's building against the host's: walks to the bit, nearest keys but for what halves round,
// and graphs that find as much.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "ann/graph/beam_search.h"
#include "ann/graph/build.h"
#include "ann/graph/graph_device.h"
#include "base/rng.h"
#include "base/threads.h"
#include "gpu/index/device_keys.h"
#include "gpu/index/device_links.h"
#include "gpu/index/device_walks.h"
#include "select/retrieval/graphs_by_device.h"
#include "select/retrieval/index.h"
#include "support/gpu.h"

namespace lode {
namespace {

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Keys in groups that follow one another, as in a text, and queries far away from all of them.
struct World {
  std::int64_t d;
  std::vector<float> keys, queries, asked;  // [n, d], [q, d], [a, d]
  QuantizedKeys coded;

  World(std::int64_t n, std::int64_t q, std::int64_t numbers) : d(numbers), coded(static_cast<int>(numbers)) {
    constexpr std::int64_t kGroups = 300, kAsked = 200;
    Rng rng(static_cast<std::uint64_t>(n + numbers));
    std::vector<float> centres(at(kGroups * d));
    for (float& c : centres) c = static_cast<float>(rng.normal());
    const auto add = [&](std::int64_t group, float offset, std::vector<float>& out) {
      for (std::int64_t j = 0; j < d; ++j)
        out.push_back(centres[at(group * d + j)] + 0.8f * static_cast<float>(rng.normal()) + offset);
    };
    for (std::int64_t i = 0; i < n; ++i) add(i / 50 % kGroups, 1.0f, keys);
    for (std::int64_t i = 0; i < q; ++i) add(static_cast<std::int64_t>(rng.below(kGroups)), -0.5f, queries);
    for (std::int64_t i = 0; i < kAsked; ++i)
      add(static_cast<std::int64_t>(rng.below(kGroups)), -0.5f, asked);
    coded.resize(n);
    for (std::int64_t i = 0; i < n; ++i) coded.put(i, matrix(keys)[i]);
  }
  Matrix<const float> matrix(const std::vector<float>& x) const { return {x.data(), std::ssize(x) / d, d}; }
};

/// A GPU that holds no keys: all comes from the host's memory.
std::unique_ptr<DeviceKeys> device_without_keys() {
  return make_device_keys([] { return GpuKeys(); }, 1, [] { return std::int64_t{8} << 30; });
}

/// Share of the 32 nearest keys of world.asked that walks find, and keys scored a walk.
std::pair<double, double> recall(const KeyGraph& graph, const World& world, ThreadPool& pool) {
  constexpr std::int64_t kWanted = 32;
  const auto exact = nearest_keys(world.matrix(world.asked), world.matrix(world.keys), kWanted, pool);
  const std::int64_t count = world.matrix(world.asked).rows;
  BeamSearch walk;
  double found = 0, scored = 0;
  for (std::int64_t q = 0; q < count; ++q) {
    walk.begin(graph, world.coded.view(), world.matrix(world.asked)[q].data(), 64);
    walk.visit(graph.entries());
    walk.run(48);
    for (std::int64_t rank = 0; rank < walk.found(); ++rank)
      found += std::count(exact.begin() + q * kWanted, exact.begin() + (q + 1) * kWanted, walk.node(rank));
    scored += static_cast<double>(walk.scored());
  }
  return {found / static_cast<double>(count * kWanted), scored / static_cast<double>(count)};
}

TEST(Graphs, WalksAreTheHosts) {
  NEEDS_GPU();
  ThreadPool pool;
  for (const auto& [n, d, degree, each] : {std::array<std::int64_t, 4>{5000, 32, 24, 64},
                                           {4500, 128, 24, 64},
                                           {900, 60, 12, 10},
                                           {40, 16, 32, 8}}) {
    const World world(n, 700, d);
    const KeyGraph graph = build_graph(world.matrix(world.keys), world.matrix(world.queries),
                                       world.coded.view(), static_cast<int>(degree), pool, false);
    const auto nearest = nearest_keys(world.matrix(world.queries), world.matrix(world.keys), each, pool);
    const Wanted wanted = {world.matrix(world.queries), nearest};
    ASSERT_GT(device_walks_bytes(wanted, world.coded.view(), graph), 0);
    const auto host = host_walks(wanted, world.coded.view(), pool),
               device = device_walks(wanted, world.coded.view(), graph);
    host->enter(graph);
    device->enter(graph);
    std::vector<std::uint32_t> visits[2], uses[2];
    host->watch(150, visits[0], uses[0]);
    device->watch(150, visits[1], uses[1]);
    EXPECT_EQ(visits[0], visits[1]);
    EXPECT_EQ(uses[0], uses[1]);
    EXPECT_EQ(host->best(48, 108), device->best(48, 108));
    for (const std::int64_t beam : {1, 5, 100}) {
      const std::vector<std::uint64_t> found = host->found(beam);
      ASSERT_EQ(found, device->found(beam));
      std::vector<MissedKey> missed;
      for (std::int32_t q = 0; q < 700; ++q)
        for (std::int32_t rank = 0; rank < each; ++rank)
          if ((found[at(q)] >> rank & 1) == 0) missed.push_back({q, rank});
      const std::vector<Node> of_host = host->offers(found, missed),
                              of_device = device->offers(found, missed);
      std::int64_t others = 0;  // distances that differ by less than rounding change places
      for (std::size_t i = 0; i < of_host.size(); ++i) others += of_host[i] != of_device[i] ? 1 : 0;
      EXPECT_LE(others, std::ssize(of_host) / 200) << n << " keys of " << d << ", beam " << beam;
    }
  }
}

/// Keys along an arc, which queries see from one side: walks go along it and see far more nodes than they keep.
TEST(Graphs, WalksThatSeeMostNodes) {
  NEEDS_GPU();
  constexpr std::int64_t kKeys = 20000, kNumbers = 60;
  ThreadPool pool;
  World world(0, 0, kNumbers);
  const auto put = [&](double place, std::vector<float>& to) {
    to.push_back(static_cast<float>(std::cos(2.5 * place)));
    to.push_back(static_cast<float>(std::sin(2.5 * place)));
    to.resize(to.size() + kNumbers - 2, 0.0f);
  };
  for (std::int64_t i = 0; i < kKeys; ++i) put(static_cast<double>(i) / kKeys, world.keys);
  for (std::int64_t i = 0; i < kKeys; ++i)
    put(std::pow((static_cast<double>(i) + 0.5) / kKeys, 1.5), world.queries);
  world.coded.resize(kKeys);
  for (std::int64_t i = 0; i < kKeys; ++i) world.coded.put(i, world.matrix(world.keys)[i]);
  const KeyGraph graph =
      build_graph(world.matrix(world.keys), world.matrix(world.queries), world.coded.view(), 24, pool, false);
  std::vector<float> some;
  for (std::int64_t q = 0; q < kKeys; q += 100) {
    const std::span<const float> query = world.matrix(world.queries)[q];
    some.insert(some.end(), query.begin(), query.end());
  }
  const Wanted towards = {world.matrix(some), {}};
  const auto host = host_walks(towards, world.coded.view(), pool),
             device = device_walks(towards, world.coded.view(), graph);
  host->enter(graph);
  device->enter(graph);
  EXPECT_EQ(host->best(150, 160), device->best(150, 160));
  std::int64_t most = 0;
  for (std::int64_t q = 0; q < towards.queries.rows; ++q) {
    BeamSearch walk;
    walk.begin(graph, world.coded.view(), towards.queries[q].data(), 160);
    walk.visit(graph.entries());
    walk.run(150);
    most = std::max(most, walk.scored());
  }
  EXPECT_GT(most, kKeys / 2);
}

/// Links as the host makes them but for rounding, for widths and degrees of all kinds, hubs and equal keys.
TEST(Graphs, LinksAreThoseOfTheHost) {
  NEEDS_GPU();
  ThreadPool pool;
  for (const auto& [n, d, degree] : {std::array<std::int64_t, 3>{3000, 48, 24},
                                     {2000, 30, 12},
                                     {500, 127, 4},
                                     {20, 16, 24},
                                     {1, 8, 24},
                                     {5000, 128, 28}}) {
    World world(n, std::max<std::int64_t>(1, n / 4), d);
    for (std::int64_t i = 0; i + 1 < std::min<std::int64_t>(n, 40); ++i)  // equal keys
      std::copy_n(world.keys.begin(), d, world.keys.begin() + i * d);
    const std::int64_t each = std::min<std::int64_t>(64, n);
    const auto nearest = nearest_keys(world.matrix(world.queries), world.matrix(world.keys), each, pool);
    ASSERT_GT(device_linker_bytes(n, d, std::ssize(nearest) / each, each, static_cast<int>(degree)), 0);
    const auto linker = device_linker(world.matrix(world.keys), nearest, each, static_cast<int>(degree));
    std::vector<bool> listed(at(n), false);
    for (const Node key : nearest) listed[at(key)] = true;
    const auto check = [&](const std::vector<Node>& rows, bool all) {
      ASSERT_EQ(std::ssize(rows), n * degree);
      for (std::int64_t x = 0; x < n; ++x) {
        std::set<Node> seen;
        bool ended = false;
        for (std::int64_t i = 0; i < degree; ++i) {
          const Node target = rows[at(x * degree + i)];
          ended = ended || target < 0;
          if (ended) {
            EXPECT_EQ(target, -1);
            continue;
          }
          EXPECT_TRUE(target < n && target != x && seen.insert(target).second) << n << " " << x;
          EXPECT_TRUE(all || (listed[at(x)] && listed[at(target)])) << n << " " << x;
        }
        EXPECT_TRUE(!seen.empty() || n <= 40 || !(all || listed[at(x)])) << n << " " << x;
      }
    };
    check(linker->link_listed(), false);
    std::vector<Node> unlisted, near;
    for (Node node = 0; node < n; ++node) {
      if (listed[at(node)]) continue;
      unlisted.push_back(node);
      near.push_back(nearest[0]);  // a hub with hundreds of links back
      near.push_back(nearest[1 % nearest.size()]);
      near.push_back(-1);
    }
    if (!unlisted.empty()) check(linker->link_near(unlisted, near, 3), true);
  }
}

TEST(Graphs, FindAsMuchAsTheHosts) {
  NEEDS_GPU();
  ThreadPool pool;
  const auto keys = device_without_keys();
  GraphsByDevice device(keys.get(), pool);
  for (const std::int64_t d : {48, 128}) {
    const World world(20000, 16000, d);
    const auto build = [&](GraphDevice* by) {
      return build_graph(world.matrix(world.keys), world.matrix(world.queries), world.coded.view(), 24, pool,
                         true, by);
    };
    const KeyGraph host = build(nullptr), graph = build(&device), again = build(&device);
    ASSERT_TRUE(keys->takes_nearest(16000, 20000, d, 64));
    ASSERT_NE(keys->walks({world.matrix(world.queries), {}}, world.coded.view(), host), nullptr);
    EXPECT_TRUE(std::ranges::equal(graph.rows(), again.rows()));
    const auto [of_host, host_scored] = recall(host, world, pool);
    const auto [of_device, scored] = recall(graph, world, pool);
    EXPECT_GT(of_host, 0.9) << d;
    EXPECT_NEAR(of_device, of_host, 0.02) << d;
    EXPECT_NEAR(scored, host_scored, 0.07 * host_scored) << d;
  }
  keys->release();
  EXPECT_EQ(keys->bytes(), 0);  // linkers and walks are gone, too
}

/// Of the queries that are kept for keys to come the products with the last keys of their lists; and how wide searches
/// must be.
TEST(Graphs, AnIndexKeepsAndJudgesAsTheHosts) {
  NEEDS_GPU();
  constexpr std::int64_t kKeys = 20000, kNumbers = 64;
  ThreadPool pool;
  const World world(kKeys, 16000, kNumbers);
  const KvRows rows = {.type = DType::f32,
                       .k = reinterpret_cast<const std::byte*>(world.keys.data()),
                       .rows = kKeys,
                       .d = kNumbers};
  const RetrievalIndex::Shape shape = {.head_dim = kNumbers, .degree = 24};
  const auto keys = device_without_keys();
  const auto built = [&](DeviceKeys* by) {
    GraphsByDevice device(by, pool);
    return RetrievalIndex(shape, rows, kKeys, RetrievalIndex::space_for(shape, rows, kKeys, world.queries),
                          {world.queries}, {.k = 32, .recall = 0.95, .asked = {world.asked}}, pool, device);
  };
  const RetrievalIndex host = built(nullptr), index = built(keys.get());
  EXPECT_EQ(index.guides(0).queries, host.guides(0).queries);
  const std::vector<float>&floors = index.guides(0).floors, &expected = host.guides(0).floors;
  ASSERT_EQ(floors.size(), expected.size());
  ASSERT_GT(expected.size(), 100u);
  for (std::size_t i = 0; i < floors.size(); ++i)
    EXPECT_NEAR(floors[i], expected[i], 0.01f * std::abs(expected[i]) + 0.1f) << i;
  EXPECT_GT(host.beam(), 0);
  EXPECT_NEAR(static_cast<double>(index.beam()), static_cast<double>(host.beam()),
              0.5 * static_cast<double>(host.beam()));
}

}  // namespace
}  // namespace lode
