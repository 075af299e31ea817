// SPDX-License-Identifier: Apache-2.0
// HashAttention's selector: what it attends follows from signatures and counts as the paper writes them;
// signatures are made once and saved; files that do not fit are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "ann/hashing/half_tables.h"
#include "io/container.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"
#include "support/hash_file.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

int bits_apart(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b) {
  int apart = 0;
  for (std::size_t w = 0; w < a.size(); ++w) {
    for (int bit = 0; bit < 32; ++bit) apart += ((a[w] ^ b[w]) >> bit & 1u) != 0 ? 1 : 0;
  }
  return apart;
}

/// Signatures and choice by their definitions, one key and one bit at a time.
class Oracle {
 public:
  Oracle(World& world, const QueryBlock& block, const LayerGeometry& geometry, const HashWeights& weights)
      : world_(world), block_(block), geometry_(geometry), weights_(weights) {}

  int distance(std::int64_t token, int query_head, Position key) const {
    const HashScheme& scheme = weights_.scheme;
    const int kv_head = query_head / geometry_.group();
    const std::int64_t d = geometry_.head_dim;
    const std::span<const float> all = scheme.roped ? block_.q : block_.q_unrotated;
    const float* q = all.data() + (token * geometry_.query_heads + query_head) * d;
    std::vector<float> x(static_cast<std::size_t>(geometry_.kv_heads * d)),
        v(static_cast<std::size_t>(geometry_.kv_heads * d));
    read_stored_keys(block_.kv.heads, key, scheme.roped ? nullptr : geometry_.rope, x);
    read_stored_values(block_.kv.heads, key, v);
    std::vector<float> input(x.begin() + kv_head * d, x.begin() + (kv_head + 1) * d);
    const std::vector<float> value(v.begin() + kv_head * d, v.begin() + (kv_head + 1) * d);
    if (scheme.values == HashScheme::Values::vector) input.insert(input.end(), value.begin(), value.end());
    if (scheme.values == HashScheme::Values::norm)
      input.push_back(std::sqrt(kernels().dot(value.data(), value.data(), d)));
    return bits_apart(
        sign(weights_.query[static_cast<std::size_t>(query_head)], q),
        sign(weights_.key[static_cast<std::size_t>(scheme.per_query_head ? query_head : kv_head)],
             input.data()));
  }

  /// The `budget` nearest of the summed distances, ties to the newer key.
  FarSet nearest(std::int64_t token, const std::vector<int>& heads, std::int64_t budget) const {
    std::vector<std::pair<int, Position>> order;
    for (Position p = block_.far_begin; p < block_.far_end(token, geometry_.dense); ++p) {
      int sum = 0;
      for (const int head : heads) sum += distance(token, head, p);
      order.emplace_back(sum, -p);
    }
    std::sort(order.begin(), order.end());
    order.resize(static_cast<std::size_t>(std::min<std::int64_t>(budget, std::ssize(order))));
    FarSet rows;
    for (const auto& [sum, row] : order) rows.emplace(-row, 0.0f);
    return rows;
  }

 private:
  static std::vector<std::uint32_t> sign(const HashNet& net, const float* x) {
    std::vector<std::uint32_t> signature(static_cast<std::size_t>(net.words()));
    HashNet::Scratch scratch;
    net.encode(x, 1, signature.data(), scratch);
    return signature;
  }
  World& world_;
  const QueryBlock& block_;
  const LayerGeometry& geometry_;
  const HashWeights& weights_;
};

TEST(HashSelector, AttendsTheNearestSignatures) {
  ThreadPool pool(2);
  for (const int bits : {32, 64, 128}) {
    for (const bool per_query_head : {false, true}) {
      for (const auto values :
           {HashScheme::Values::off, HashScheme::Values::norm, HashScheme::Values::vector}) {
        const HashScheme scheme = {.bits = bits,
                                   .roped = values != HashScheme::Values::norm,
                                   .per_query_head = per_query_head,
                                   .values = values};
        World world({.kv_heads = 2, .group = 3, .d = 64, .type = DType::f16, .dense = {1, 16}});
        const LayerGeometry geometry = world.geometry(pool);
        const std::string file = write_hash_file(geometry, scheme).string();
        world.write(90);
        const QueryBlock block = world.block(86, 4);
        const HashWeights weights = random_hash_weights(geometry, scheme);
        const Oracle oracle(world, block, geometry, weights);
        const auto together = make("hash:budget=13,weights=" + file, geometry),
                   alone = make("hash:budget=1/5,per=query-head,weights=" + file, geometry);
        const std::vector<FarSet> by_group = select(*together, block, geometry),
                                  by_head = select(*alone, block, geometry);
        for (std::int64_t t = 0; t < 4; ++t) {
          const std::int64_t far = block.far_end(t, geometry.dense) - 1;
          for (int h = 0; h < 6; ++h) {
            const int first = h / 3 * 3;
            const auto at = static_cast<std::size_t>(t * 6 + h);
            EXPECT_EQ(by_group[at], oracle.nearest(t, {first, first + 1, first + 2}, 13));
            EXPECT_EQ(by_head[at], oracle.nearest(t, {h}, (far + 4) / 5));
          }
        }
      }
    }
  }
}

// Keys that many queries would like: the level of the best plus depth, for each head of the group.
TEST(HashSelector, DepthAndCombinedKeepWithinTheBest) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string file = write_hash_file(geometry, {}).string();
  world.write(400);
  const QueryBlock block = world.block(399, 1);
  const HashWeights weights = random_hash_weights(geometry, {});
  const Oracle oracle(world, block, geometry, weights);
  std::vector<int> sums(static_cast<std::size_t>(block.far_end(0, geometry.dense)), 1000);
  for (Position p = 1; p < block.far_end(0, geometry.dense); ++p)
    sums[static_cast<std::size_t>(p)] = oracle.distance(0, 0, p) + oracle.distance(0, 1, p);
  const int best = *std::min_element(sums.begin(), sums.end());
  for (const int depth : {0, 1, 3, 6}) {
    FarSet expected;
    for (Position p = 1; p < block.far_end(0, geometry.dense); ++p) {
      if (sums[static_cast<std::size_t>(p)] <= best + 2 * depth) expected.emplace(p, 0.0f);
    }
    const std::string tail = ",depth=" + std::to_string(depth) + ",weights=" + file;
    EXPECT_EQ(select(*make("hash:mode=depth" + tail, geometry), block, geometry)[1], expected);
    const FarSet both = select(*make("hash:mode=combined,budget=20" + tail, geometry), block, geometry)[0];
    EXPECT_EQ(both.size(), std::min<std::size_t>(20, expected.size()));
    EXPECT_TRUE(std::includes(expected.begin(), expected.end(), both.begin(), both.end()));
  }
}

// Signatures depend on the stored row alone: grown token by token, cut and grown again, they are those of one
// build.
TEST(HashSelector, GrownEqualsRebuiltAndBytesAreCounted) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 64, .type = DType::q8, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const HashScheme scheme = {.bits = 64, .roped = false};
  const std::string spec = "hash:budget=9,weights=" + write_hash_file(geometry, scheme).string();
  const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
  for (int i = 0; i < 300; ++i) {
    world.write(1);
    grown->append(0, world.store().layer(0),
                  static_cast<Position>(std::max<std::int64_t>(1, world.tokens() - 16)));
    if (i == 200) {
      world.store().roll_back(100);
      grown->roll_back(0, 100);
    }
  }
  rebuilt->build(0, world.store().layer(0));
  const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 1), 1);
  EXPECT_EQ(select(*grown, block, geometry), select(*rebuilt, block, geometry));
  const std::int64_t far = world.tokens() - 1 - 16;
  const SelectWork work = rebuilt->take_work();
  const std::int64_t functions = 4 * (64 * 24 + 24 + 24 * 64 + 64) * 4;  // phi_q of four heads, float32
  EXPECT_EQ(work.bytes, 2 * far * 8 + functions);
  EXPECT_EQ(work.keys_scored, 2 * far);
  EXPECT_EQ(rebuilt->index_bytes(), 2 * (world.tokens() - 1) * 8);
  const Spec parsed = parse_spec(spec);
  EXPECT_EQ(find_method("hash").index_bytes(parsed, geometry, world.tokens() - 1), rebuilt->index_bytes());
}

// Tables change what is read, never what is chosen: grown, cut, grown again, saved and loaded.
TEST(HashSelector, TablesChooseTheSameKeys) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 3, .d = 64, .type = DType::f16, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string file = write_hash_file(geometry, {}).string();
  for (const std::string per : {"kv-head", "query-head"}) {
    const std::string rest = ",budget=1/9,per=" + per + ",weights=" + file;
    const auto plain = make("hash:index=off" + rest, geometry),
               tables = make("hash:index=on" + rest, geometry),
               loaded = make("hash:index=on" + rest, geometry);
    world.store().roll_back(0);
    world.write(2000);
    for (const auto& selector : {plain.get(), tables.get()}) selector->build(0, world.store().layer(0));
    EXPECT_EQ(tables->index_bytes() - plain->index_bytes(), 2 * HalfTables::bytes_of(1999));
    const auto same = [&](Selector& a) {
      const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 3), 3);
      const std::vector<FarSet> expected = select(*plain, block, geometry);
      EXPECT_EQ(select(a, block, geometry), expected) << world.tokens();
      return expected;
    };
    same(*tables);
    for (const std::int64_t cut : {1990, 1000, 3000}) {
      if (cut < world.tokens()) {
        world.store().roll_back(cut);
        plain->roll_back(0, cut);
        tables->roll_back(0, cut);
      } else {
        world.write(cut - world.tokens());
      }
      same(*tables);
      world.write(300);
      same(*tables);
    }
    const std::filesystem::path path =
        std::filesystem::path(testing::TempDir()) / ("hash-tables-" + std::to_string(getpid()) + ".lode");
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    plain->save(0, sections);  // nothing of the tables is saved
    out.finish();
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    loaded->load(0, reader, world.store().layer(0));
    EXPECT_GT(loaded->index_bytes(), 2 * HalfTables::bytes_of(world.tokens() / 2));
    same(*loaded);
    std::filesystem::remove(path);
  }
}

TEST(HashSelector, TablesAreOfOneShortSignatureAndCounts) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string wide = ",weights=" + write_hash_file(geometry, {.bits = 64}).string();
  make("hash:index=auto" + wide, geometry);
  EXPECT_THROW(make("hash:index=on" + wide, geometry), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,index=on,mode=depth"), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,index=maybe"), InputError);
  const std::string many =
      ",weights=" + write_hash_file(geometry, {.bits = 32, .per_query_head = true}).string();
  EXPECT_THROW(make("hash:index=on" + many, geometry), InputError);
  make("hash:index=on,per=query-head" + many, geometry);
  // From 2^20 keys on and budgets of 1/512 of them the estimate of memory has the tables.
  const std::int64_t many_keys = (std::int64_t{1} << 20) + 1;
  const auto bytes = [&](const char* spec) {
    return find_method("hyperplanes").index_bytes(parse_spec(spec), geometry, many_keys);
  };
  EXPECT_EQ(bytes("hyperplanes:budget=2048") - bytes("hyperplanes:budget=2049"),
            HalfTables::bytes_of(many_keys - 1));
}

TEST(HashSelector, BitsMustBeTheFilesAndKeysMustFitTheMode) {
  ThreadPool pool(1);
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string file = write_hash_file(geometry, {.bits = 64}).string();
  make("hash:bits=64,weights=" + file, geometry);
  EXPECT_THROW(make("hash:bits=32,weights=" + file, geometry), InputError);
  EXPECT_THROW(make("hash", geometry), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,bits=16"), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,mode=count,depth=3"), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,mode=depth,budget=3"), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,budget=0"), InputError);
  EXPECT_THROW(parse_spec("hash:weights=x,ties=oldest"), InputError);
  EXPECT_THROW(parse_spec("hyperplanes:bits=48"), InputError);
  EXPECT_THROW(parse_spec("hyperplanes:weights=x"), InputError);
}

TEST(HashSelector, FilesThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .group = 2, .d = 64});
  const LayerGeometry geometry = world.geometry(pool);
  const HashWeights good = random_hash_weights(geometry, {});
  const std::filesystem::path path = write_hash_file(geometry, {});
  const auto refused = [&](const std::string& part, const char* fingerprint = "model") {
    try {
      make("hash:weights=" + path.string(), geometry, fingerprint);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(part));
      EXPECT_THAT(error.what(), testing::HasSubstr(path.string()));
    }
  };
  const auto write = [&](const HashWeights& weights, int layers = 4) {
    write_hash_weights(path, std::vector(static_cast<std::size_t>(layers), weights), "model",
                       {{"note", "x"}});
  };
  make("hash:weights=" + path.string(), geometry);
  refused("model_fingerprint is one of another, found 'model'", "another");
  write(good, 3);
  refused("layer.3.query.0.weight.0");
  HashWeights bad = good;
  bad.query.pop_back();
  write(bad);
  refused("layer.3.query.3.weight.0");
  bad = good;
  bad.key[1] = random_net(32, {24}, {}, 1);
  write(bad);
  refused("[1 to 8192, 64]");
  bad = good;
  bad.key[1] = random_net(64, {24}, {.bits = 64}, 1);
  write(bad);
  refused("32 outputs of 'layer.3.key.1'");
  std::vector<HashLayer> layers = good.key[0].layers();
  layers[1].bias[3] = std::numeric_limits<float>::infinity();
  bad = good;
  bad.key[0] = HashNet(layers, good.scheme.activation);
  write(bad);
  refused("finite numbers in tensor 'layer.3.key.0.bias.1'");
  write_safetensors(path, {}, {});
  refused("found none given");
  write_safetensors(path, {}, {{"format", "lodestone hash"}, {"bits", "33"}});
  refused("bits is one of 32, 64, 128, found '33'");
  std::filesystem::remove(path);
  refused("");
}

/// A saved index, to be changed and loaded again.
struct Sections {
  std::vector<std::int64_t> shape;
  std::string functions;
  std::vector<std::uint32_t> codes;
};

TEST(HashSelector, DamagedIndexesAndOtherFunctionsAreRefusedAndLeaveTheOldOne) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 2, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(120);
  const std::string spec = "hash:budget=5,weights=" + write_hash_file(geometry, {}).string();
  const auto selector = make(spec, geometry);
  selector->build(0, world.store().layer(0));
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("hash-" + std::to_string(getpid()) + ".lode");
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
    copy(good.functions, reader.values<char>("functions"));
    copy(good.codes, reader.values<std::uint32_t>("codes"));
  }
  const auto load = [&](Selector& into, const Sections& s) {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    sections.add<std::int64_t>("shape", s.shape);
    sections.add("functions", std::as_bytes(std::span(s.functions)));
    sections.add<std::uint32_t>("codes", s.codes);
    out.finish();
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    into.load(0, reader, world.store().layer(0));
  };
  EXPECT_EQ(good.shape, (std::vector<std::int64_t>{2, 1, 1, 120}));
  load(*selector, good);
  const std::vector<FarSet> before = select(*selector, world.block(119, 1), geometry);
  const std::vector<std::function<void(Sections&)>> damages = {
      [](Sections& s) { s.shape.pop_back(); },
      [](Sections& s) { s.shape.clear(); },
      [](Sections& s) { s.shape[0] = 4; },
      [](Sections& s) { s.shape[1] = 2; },
      [](Sections& s) { s.shape[2] = 0; },
      [](Sections& s) { s.shape[3] = 121; },
      [](Sections& s) { s.shape[3] = 0; },
      [](Sections& s) { s.shape[3] = std::numeric_limits<std::int64_t>::min(); },
      [](Sections& s) { s.shape[3] = std::int64_t{1} << 61; },
      [](Sections& s) { s.functions.pop_back(); },
      [](Sections& s) { s.functions.clear(); },
      [](Sections& s) { s.codes.pop_back(); },
      [](Sections& s) { s.codes.push_back(1); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    Sections bad = good;
    damages[i](bad);
    EXPECT_THROW(load(*selector, bad), InputError) << i;
    EXPECT_EQ(select(*selector, world.block(119, 1), geometry), before) << i;
  }
  // The same spec after the file was trained anew.
  write_hash_file(geometry, {}, 2);
  EXPECT_THROW(load(*make(spec, geometry), good), InputError);
  std::filesystem::remove(path);
}

// With enough directions the angle is seen: planted keys that point as the query does are found.
TEST(Hyperplanes, FindKeysThatPointAsTheQueryDoes) {
  ThreadPool pool(2);
  World world({.kv_heads = 1, .group = 2, .d = 64, .dense = {1, 64}});
  plant_topics(world, 40, 0.3f);
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  const auto selector = make("hyperplanes:bits=128,rope=off,budget=73", geometry);
  selector->build(0, world.store().layer(0));
  const TopicQuery query(world, 2999, 7);
  const std::vector<FarSet> found = select(*selector, query.block, geometry);
  EXPECT_EQ(found[0].size(), 73u);
  int planted = 0;
  for (Position p = 7; p < 2936; p += 40) planted += found[0].contains({p, 0.0f}) ? 1 : 0;
  EXPECT_EQ(planted, 73);
}

}  // namespace
}  // namespace lode::test
