// SPDX-License-Identifier: Apache-2.0
// The k-means index: buckets of what centroids say, one bucket a key, files that are refused when they do not
// fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>

#include "io/container.h"
#include "io/safetensors.h"
#include "lodestone/error.h"
#include "select/shared/buckets.h"
#include "select/shared/centroids.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::path(testing::TempDir()) / ("kmeans-" + std::to_string(getpid()) + "-" + name);
}

/// Centroids for the layer of World::geometry (3) and the ones before it.
std::vector<std::vector<std::vector<float>>> random_centroids(int clusters, int heads, int d) {
  Rng rng(1);
  std::vector<std::vector<std::vector<float>>> layers(
      4, std::vector<std::vector<float>>(static_cast<std::size_t>(heads)));
  for (auto& layer : layers) {
    for (auto& head : layer) {
      head.resize(static_cast<std::size_t>(clusters * d));
      for (float& x : head) x = static_cast<float>(rng.normal());
    }
  }
  return layers;
}

// Against a plain search: the probed buckets are those with the largest centroid products, and all their far
// keys are attended.
TEST(KMeansSelector, AttendsWholeBucketsOfTheBestCentroids) {
  ThreadPool pool(2);
  const std::filesystem::path path = temporary("c.safetensors");
  for (const bool roped : {false, true}) {
    World world({.kv_heads = 2, .group = 3, .d = 64, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    const auto layers = random_centroids(12, 2, 64);
    write_centroids(path, layers, 64, roped, "model");
    const auto selector =
        make("kmeans:probes=3,weights=" + path.string() + (roped ? ",rope=on" : ""), geometry);
    world.write(150);
    selector->build(0, world.store().layer(0));
    world.write(30);
    const QueryBlock block = world.block(170, 10);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 10; ++t) {
      for (int h = 0; h < 2; ++h) {
        const std::vector<float>& centroids = layers[3][static_cast<std::size_t>(h)];
        const auto unit_product = [&](const std::vector<double>& x, int c) {
          double dot = 0, norm = 0;
          for (int i = 0; i < 64; ++i) {
            const double y = centroids[static_cast<std::size_t>(c * 64 + i)];
            dot += x[static_cast<std::size_t>(i)] * y;
            norm += y * y;
          }
          return dot / std::sqrt(norm);
        };
        std::vector<double> q(64, 0.0);
        for (int g = 0; g < 3; ++g) {
          for (int i = 0; i < 64; ++i) {
            q[static_cast<std::size_t>(i)] +=
                (roped ? block.q : block.q_unrotated)[static_cast<std::size_t>((t * 6 + h * 3 + g) * 64 + i)];
          }
        }
        std::vector<int> order(12);
        std::iota(order.begin(), order.end(), 0);
        std::vector<std::vector<Position>> buckets(12);
        for (Position p = 1; p < block.far_end(t, geometry.dense); ++p) {
          std::vector<float> key = world.key(p, h);
          if (!roped) world.rope().unrotate(key, p);
          const std::vector<double> k(key.begin(), key.end());
          const int best = *std::max_element(order.begin(), order.end(), [&](int a, int b) {
            return unit_product(k, a) < unit_product(k, b);
          });
          buckets[static_cast<std::size_t>(best)].push_back(p);
        }
        std::erase_if(order, [&](int c) { return buckets[static_cast<std::size_t>(c)].empty(); });
        std::sort(order.begin(), order.end(),
                  [&](int a, int b) { return unit_product(q, a) > unit_product(q, b); });
        FarSet expected;
        for (int probe = 0; probe < 3; ++probe) {
          for (const Position p : buckets[static_cast<std::size_t>(order[static_cast<std::size_t>(probe)])])
            expected.emplace(p, 0.0f);
        }
        for (int g = 0; g < 3; ++g) EXPECT_EQ(found[static_cast<std::size_t>(t * 6 + h * 3 + g)], expected);
      }
    }
  }
  std::filesystem::remove(path);
}

// With trained centroids the index is a function of the keys: grown token by token it equals one that was
// built at once.
/// With as many clusters for any text, each holds more and more keys, until its centroid says nothing of one of them.
TEST(KMeansSelector, ClustersFollowTheText) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const Spec spec = parse_spec("kmeans");
  const auto clusters = [&](std::int64_t tokens) {
    const std::int64_t lists = tokens * std::int64_t{sizeof(Position)} * 3 / 2;
    return (find_method("kmeans").index_bytes(spec, geometry, tokens) - lists) / (64 * 4);
  };
  for (const std::int64_t k : {1, 4, 16, 24, 32, 64, 128, 256}) {
    const std::int64_t tokens = k * 1024;
    EXPECT_LE(tokens / clusters(tokens), 32) << k << "k";
    EXPECT_GE(tokens / clusters(tokens), 16) << k << "k";
  }
  EXPECT_EQ(clusters(16 * 1024), 1024) << "as the paper has";
  EXPECT_EQ(clusters(1024 * 1024), 8192) << "the most among which a GPU chooses";
}

TEST(KMeansSelector, GrownEqualsRebuilt) {
  ThreadPool pool(2);
  const std::filesystem::path path = temporary("grown.safetensors");
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  write_centroids(path, random_centroids(9, 2, 64), 64, false, "model");
  const std::string spec = "kmeans:probes=2,weights=" + path.string();
  const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
  for (int i = 0; i < 200; ++i) {
    world.write(1);
    grown->append(0, world.store().layer(0),
                  static_cast<Position>(std::max<std::int64_t>(1, world.tokens() - 16)));
  }
  rebuilt->build(0, world.store().layer(0));
  EXPECT_EQ(select(*grown, world.block(190, 10), geometry), select(*rebuilt, world.block(190, 10), geometry));
  std::filesystem::remove(path);
}

TEST(KMeansSelector, FindsPlantedKeysWithFewBytes) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 64}});
  plant_topics(world, 40, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  const auto selector = make("kmeans:clusters=128,probes=8", geometry);
  selector->build(0, world.store().layer(0));
  const TopicQuery query(world, 2999, 7);
  const std::vector<FarSet> found = select(*selector, query.block, geometry);
  for (Position p = 7; p < 2936; p += 40) EXPECT_TRUE(found[0].contains({p, 0.0f})) << p;
  EXPECT_LT(found[0].size(), 600u);
  const SelectWork work = selector->take_work();
  EXPECT_EQ(work.bytes, 128 * 64 * 4 + 4 * std::ssize(found[0]));
  EXPECT_EQ(work.keys_scored, 128);
  EXPECT_GE(selector->index_bytes(), 128 * 64 * 4 + 2999 * 4);
  EXPECT_LT(selector->index_bytes(), 128 * 64 * 4 + 2 * 2999 * 4 + 128 * 32);
}

TEST(Centroids, FilesThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  const std::filesystem::path path = temporary("bad.safetensors");
  World world({.kv_heads = 2, .group = 2, .d = 64});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "kmeans:weights=" + path.string();
  const auto refused = [&](const std::string& part, const std::string& with = "",
                           const char* fingerprint = "model") {
    try {
      make(spec + with, geometry, fingerprint);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(part));
      EXPECT_THAT(error.what(), testing::HasSubstr(path.string()));
    }
  };
  refused("");  // missing file
  auto layers = random_centroids(5, 2, 64);
  write_centroids(path, layers, 64, false, "model");
  make(spec, geometry);
  refused("rope 'on'", ",rope=on");
  refused("model_fingerprint 'another'", "", "another");
  write_centroids(path, random_centroids(5, 2, 32), 32, false, "model");
  refused("[1 to 1048576, 64]");
  write_centroids(path, random_centroids(5, 1, 64), 64, false, "model");
  refused("layer.3.head.1.centroids");
  layers[3][1][100] = std::numeric_limits<float>::quiet_NaN();
  write_centroids(path, layers, 64, false, "model");
  refused("finite");
  layers = random_centroids(5, 2, 64);
  layers[3][1].resize(4 * 64);
  write_centroids(path, layers, 64, false, "model");
  refused("expected 5 centroids");
  write_safetensors(path, {}, {});
  refused("found none given");
  std::filesystem::remove(path);
}

TEST(Centroids, TrainedOnOtherTextsServeANewOne) {
  const std::filesystem::path path = temporary("trained.safetensors");
  const WorldShape shape = {.kv_heads = 2, .group = 2, .d = 64, .dense = {1, 16}};
  World first(shape, 1), second(shape, 2), fresh(shape, 3);
  std::vector<std::vector<std::vector<std::vector<float>>>> trained;
  for (World* world : {&first, &second, &fresh}) {
    plant_topics(*world, 10, 0.2f);
    world->write(300);
  }
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    CentroidTrainer trainer(1, 2, 64, /*roped=*/false, 5);
    trainer.add(first.store(), first.rope(), 1, 100, pool);
    trainer.add(second.store(), second.rope(), 1, 1000, pool);
    EXPECT_EQ(trainer.keys(), 100 + 299);
    EXPECT_THROW(trainer.train(400, pool), InputError);
    trained.push_back(trainer.train(32, pool));
  }
  EXPECT_EQ(trained[0], trained[1]);
  // The artefact of a whole model: World's geometry asks for layer 3.
  write_centroids(path, {{trained[0][0], trained[0][0], trained[0][0], trained[0][0]}}, 64, false, "model");
  ThreadPool pool(2);
  const LayerGeometry geometry = fresh.geometry(pool);
  const auto selector = make("kmeans:probes=12,weights=" + path.string(), geometry);
  selector->build(0, fresh.store().layer(0));
  const TopicQuery query(fresh, 299, 4);
  const std::vector<FarSet> found = select(*selector, query.block, geometry);
  for (Position p = 4; p < 284; p += 10) EXPECT_TRUE(found[0].contains({p, 0.0f})) << p;
  EXPECT_LT(found[0].size(), 200u);
  std::filesystem::remove(path);
}

/// The sections of a saved index, to be changed and loaded again.
struct Sections {
  std::vector<std::int64_t> shape, offsets;
  std::vector<float> centroids;
  std::vector<Position> rows;
};

TEST(KMeansSelector, DamagedIndexesAreRefusedAndLeaveTheOldOne) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(120);
  const auto selector = make("kmeans:clusters=6,probes=2", geometry);
  selector->build(0, world.store().layer(0));
  const std::filesystem::path path = temporary("index.lode");
  Sections good;
  {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    selector->save(0, sections);
    out.finish();
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    const auto copy = [](auto& to, auto from) { to.assign(from.begin(), from.end()); };
    copy(good.shape, reader.values<std::int64_t>("shape"));
    copy(good.offsets, reader.values<std::int64_t>("offsets"));
    copy(good.centroids, reader.values<float>("centroids"));
    copy(good.rows, reader.values<Position>("rows"));
  }
  const auto load = [&](const Sections& s, KvLayer kv) {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    sections.add<std::int64_t>("shape", s.shape);
    sections.add<float>("centroids", s.centroids);
    sections.add<std::int64_t>("offsets", s.offsets);
    sections.add<Position>("rows", s.rows);
    out.finish();
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    selector->load(0, reader, kv);
  };
  const KvLayer kv = world.store().layer(0);
  load(good, kv);
  const std::vector<FarSet> before = select(*selector, world.block(119, 1), geometry);
  const std::vector<std::function<void(Sections&)>> damages = {
      [](Sections& s) { s.shape.pop_back(); },
      [](Sections& s) { s.shape[0] = 3; },
      [](Sections& s) { s.shape[1] = 7; },
      [](Sections& s) { s.shape[1] = 0; },
      [](Sections& s) { s.shape[1] = -6; },
      [](Sections& s) { s.shape[1] = std::int64_t{1} << 62; },
      [](Sections& s) { s.shape[2] = 128; },
      [](Sections& s) { s.shape[3] = 2; },
      [](Sections& s) { s.shape[4] = 121; },
      [](Sections& s) { s.shape[4] = std::numeric_limits<std::int64_t>::min(); },
      [](Sections& s) { s.centroids[5] = std::numeric_limits<float>::infinity(); },
      [](Sections& s) { s.centroids.pop_back(); },
      [](Sections& s) { s.offsets[2] = s.offsets[3] + 1; },
      [](Sections& s) { s.offsets[0] = -1; },
      [](Sections& s) { s.offsets[6] -= 1; },
      [](Sections& s) { s.rows[0] = 120; },
      [](Sections& s) { s.rows[0] = 0; },
      [](Sections& s) { s.rows[0] = -5; },
      [](Sections& s) { s.rows[1] = s.rows[0]; },
      [](Sections& s) { s.rows.pop_back(); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    Sections bad = good;
    damages[i](bad);
    EXPECT_THROW(load(bad, kv), InputError) << i;
    EXPECT_EQ(select(*selector, world.block(119, 1), geometry), before) << i;
  }
  std::filesystem::remove(path);
}

TEST(Buckets, LabelsAreThoseThatWereAdded) {
  BucketIndex index(3, /*heads=*/2, /*buckets=*/5);
  std::vector<std::int32_t> labels(2 * 40);
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::int32_t>(i * i % 5);
  index.add(labels, 40);
  for (const int head : {0, 1}) {
    const std::vector<std::uint16_t> found = index.labels(head, 10, 43);
    ASSERT_EQ(found.size(), 33u);
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found[i], labels[static_cast<std::size_t>(head) * 40 + 7 + i]) << head << " " << i;
    EXPECT_TRUE(index.labels(head, 3, 3).empty());
  }
}

}  // namespace
}  // namespace lode::test
