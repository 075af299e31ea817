// SPDX-License-Identifier: Apache-2.0
// What every registered method must keep, whatever it selects. A new method is tested as soon as it is
// registered; one that has no defaults for a text of a few hundred tokens adds its specs to specs_of.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>

#include "io/container.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/plan/file.h"
#include "support/forged_index.h"
#include "support/hash_file.h"
#include "support/rounding.h"
#include "support/saap.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

/// A plan for World's geometry: heads that two methods serve in turn.
std::filesystem::path made_plan(int kv_heads) {
  const auto path = std::filesystem::path(testing::TempDir()) /
                    ("lodestone-plan-" + std::to_string(getpid()) + "-" + std::to_string(kv_heads));
  std::vector<std::string> heads;
  for (int h = 0; h < kv_heads; ++h) heads.emplace_back(h % 2 == 0 ? "kmeans:probes=2" : "topk:k=5");
  write_plan(path, {.model_fingerprint = "model",
                    .note = "",
                    .dense = {.sink = 2, .window = 20},
                    .heads = std::vector(4, heads)});
  return path;
}

/// Specs to try a method with, beside its defaults.
std::vector<std::string> specs_of(const std::string& method) {
  if (method == "topk") {
    return {"topk:k=5",          "topk:k=10%",           "topk:mass=0.6",
            "topk:k=7,by=value", "topk:k=5,per=kv-head", "topk:mass=0.9,by=value,per=kv-head"};
  }
  if (method == "random") return {"random", "random:fraction=17", "random:fraction=70%"};
  if (method == "kmeans")
    return {"kmeans:probes=2", "kmeans:clusters=40,probes=5,rope=on", "kmeans:clusters=10%,probes=3"};
  if (method == "hash") {
    return {"hash:weights=made,budget=20%", "hash:weights=made,budget=9,per=query-head,ties=all",
            "hash:weights=made,mode=depth,depth=1", "hash:weights=made,mode=combined,budget=15,depth=2"};
  }
  if (method == "hyperplanes")
    return {"hyperplanes:budget=20%", "hyperplanes:bits=128,budget=11,per=query-head,rope=off"};
  if (method == "saap") return {"saap:probes=3", "saap:probes=2,group=independent"};
  if (method == "retrieval") {  // warm: what a token gets depends on the tokens before it, by intent
    return {"retrieval",
            "retrieval:k=4,beam=3,degree=6,warm=off",
            "retrieval:k=3,beam=2,degree=4,per=query-head,warm=off",
            "retrieval:mass=0.7,beam=2,degree=8,warm=off",
            "retrieval:error=0.5,k=40%,rest=4,degree=8,warm=off",
            "retrieval:k=4,rest=6,beam=3,degree=6,warm=off"};
  }
  if (method == "magicpig") return {"magicpig:L=20", "magicpig:K=3,L=12", "magicpig:K=1,L=2"};
  if (method == "h2o") return {"h2o", "h2o:heavy_ratio=9,recent_ratio=30,queries=64"};
  if (method == "snapkv")
    return {"snapkv:window_size=8,max_capacity_prompt=20", "snapkv:max_capacity_prompt=10%,per=kv-head"};
  if (method == "ivf") return {"ivf:nlist=12,nprobe=3,k=10", "ivf:k=5%,nprobe=1"};
  if (method == "hnsw") return {"hnsw:M=4,ef_construction=10,k=9", "hnsw:M=2,ef_construction=4,k=5%,ef=20"};
  if (method == "kdeformer") return {"kdeformer:bucket_size=20", "kdeformer:num_projs=32,bucket_size=10%"};
  if (method == "reformer")
    return {"reformer:bucket_size=16", "reformer:num_buckets=6,n_hashes=3,bucket_size=5%,chunks_before=0"};
  if (method == "ideal") return {"ideal", "ideal:sparsity=0.5,block=3"};
  if (method == "squeezed") {
    return {"squeezed:sparsity=0.7", "squeezed:levels=2,clusters=20%,clusters1=5%,mass=0.8",
            "squeezed:clusters=40,tail=on,sparsity=0.5", "squeezed:levels=auto,error=0.1"};
  }
  if (method == "quest") {
    return {"quest:budget=20%", "quest:page_size=4,budget=17,bits=4,per=kv-head",
            "quest:page_size=3,budget=1/3,bits=2"};
  }
  if (method == "double-sparsity") {
    return {"double-sparsity:budget=20%", "double-sparsity:channels=3,bits=2,budget=9,per=kv-head",
            "double-sparsity:bits=16,budget=11,channels=5"};
  }
  if (method == "infllm") {
    return {"infllm:block_size=16,topk=3", "infllm:block_size=7,repr_topk=2,budget=20%,per=kv-head",
            "infllm:block_size=4,repr_topk=9,topk=5,rope=on"};
  }
  if (method == "pqcache")
    return {"pqcache:budget=20%", "pqcache:m=4,bits=4,budget=9,per=query-head",
            "pqcache:m=1,bits=8,budget=11"};
  if (method == "plan") return {"plan:made"};
  return {method};
}

std::vector<std::string> all_specs() {
  std::vector<std::string> specs;
  for (const MethodInfo& method : methods()) {
    for (const std::string& spec : specs_of(method.name)) specs.push_back(spec);
  }
  return specs;
}

/// Methods that need an artefact get a made one.
Spec with_artefact(const std::string& text, const LayerGeometry& geometry) {
  Spec spec = parse_spec(text == "plan:made" ? "plan:" + made_plan(geometry.kv_heads).string() : text);
  if (spec.name == "hash")
    spec.given["weights"] = write_hash_file(geometry, {.values = HashScheme::Values::norm}).string();
  if (spec.name == "saap")
    spec.given["weights"] = SaapFiles::of({.kv_heads = geometry.kv_heads, .d = geometry.head_dim});
  return spec;
}

std::unique_ptr<Selector> make_with_artefact(const std::string& text, const LayerGeometry& geometry) {
  const Spec spec = with_artefact(text, geometry);
  const MethodInfo& method = find_method(spec.name);
  return method.make ? method.make(spec, geometry, "model") : make_full_selector(geometry);
}

class EveryMethod : public testing::TestWithParam<std::string> {
 protected:
  ThreadPool pool_{2};
};
INSTANTIATE_TEST_SUITE_P(Select, EveryMethod, testing::ValuesIn(all_specs()), [](const auto& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

// A key is in exactly one of sink, window and index: select() never names a row twice or one that is not far
// (far_sets checks it), and the history of appends and rollbacks leaves no trace.
TEST_P(EveryMethod, HistoryLeavesNoTrace) {
  World world({.kv_heads = 2, .group = 3, .dense = {2, 20}});
  const LayerGeometry geometry = world.geometry(pool_);
  Rng rng(5);
  world.write(150);
  const auto lived = make_with_artefact(GetParam(), geometry);
  lived->build(0, world.store().layer(0));
  for (int step = 0; step < 60; ++step) {
    const auto count = static_cast<std::int64_t>(1 + rng.below(9));
    if (rng.below(4) == 0) {
      const std::int64_t cut =
          std::max<std::int64_t>(150, world.tokens() - static_cast<std::int64_t>(rng.below(50)));
      world.store().roll_back(cut);
      lived->roll_back(0, cut);
    }
    world.write(count);
    const QueryBlock block = world.block(static_cast<Position>(world.tokens() - count), count);
    const std::vector<FarSet> found = select(*lived, block, geometry);
    if (step % 6 != 0) continue;
    const auto fresh = make_with_artefact(GetParam(), geometry);
    KvLayer context = world.store().layer(0);
    std::vector<KvRows> heads(context.heads.begin(), context.heads.end());
    for (KvRows& head : heads) head.rows = 150;
    fresh->build(0, {.heads = heads, .tokens = 150});
    EXPECT_EQ(select(*fresh, world.block(block.begin, count), geometry), found) << step;
  }
}

// A text that was heard but never built, as its context may be cut or asked before it is complete.
TEST_P(EveryMethod, TextsThatWereOnlyHeardAreChosenFrom) {
  World world({.kv_heads = 2, .group = 2, .dense = {2, 20}});
  const LayerGeometry geometry = world.geometry(pool_);
  const auto heard = make_with_artefact(GetParam(), geometry);
  world.write(300);
  tell(*heard, world, 300);
  for (const std::int64_t tokens : {300, 200, 1}) {
    world.store().roll_back(tokens);
    heard->roll_back(0, tokens);
    world.write(50);
    for (int again = 0; again < 2; ++again)  // checks that keys are far and named once
      select(*heard, world.block(static_cast<Position>(tokens), 50), geometry);
  }
}

TEST_P(EveryMethod, BuildingTwiceOrAppendingAgainChangesNothing) {
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool_);
  world.write(200);
  const auto once = make_with_artefact(GetParam(), geometry),
             twice = make_with_artefact(GetParam(), geometry);
  once->build(0, world.store().layer(0));
  twice->build(0, world.store().layer(0));
  twice->build(0, world.store().layer(0));
  world.write(40);
  for (const Position far_end : {100, 190, 205, 203, 205}) twice->append(0, world.store().layer(0), far_end);
  const QueryBlock block = world.block(230, 10);
  EXPECT_EQ(select(*once, block, geometry), select(*twice, block, geometry));
}

TEST_P(EveryMethod, ChunksAndBatchesDoNotMatter) {
  const WorldShape shape = {.kv_heads = 2, .group = 2, .dense = {1, 16}};
  World first(shape, 1, 0), second(shape, 2, 5);
  const LayerGeometry geometry = first.geometry(pool_);
  const auto alone = make_with_artefact(GetParam(), geometry),
             batched = make_with_artefact(GetParam(), geometry);
  for (World* world : {&first, &second}) {
    world->write(world == &first ? 220 : 90);
    for (Selector* selector : {alone.get(), batched.get()})
      selector->build(world == &first ? 0 : 5, world->store().layer(0));
    world->write(24);
  }
  const std::vector<QueryBlock> blocks = {second.block(90, 24), first.block(220, 24)};
  for (const QueryBlock& block : blocks)
    batched->append(block.sequence, block.kv, block.far_end(23, geometry.dense));
  Selection together;
  batched->select(blocks, together);
  std::vector<FarSet> expected;
  for (Position p = 220; p < 244; ++p) {
    for (FarSet& set : select(*alone, first.block(p, 1), geometry)) expected.push_back(std::move(set));
  }
  EXPECT_EQ(far_sets(together, first.block(220, 24), geometry), expected);
  EXPECT_EQ(far_sets(together, second.block(90, 24), geometry),
            select(*alone, second.block(90, 24), geometry));
}

TEST_P(EveryMethod, ThreadsDoNotMatter) {
  World world({.kv_heads = 3, .group = 2, .dense = {1, 16}});
  world.write(300);
  std::vector<std::vector<FarSet>> found;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const auto selector = make_with_artefact(GetParam(), world.geometry(pool));
    selector->build(0, world.store().layer(0));
    found.push_back(select(*selector, world.block(290, 10), world.geometry(pool)));
  }
  EXPECT_EQ(found[0], found[1]);
}

TEST_P(EveryMethod, SavedAndLoadedSelectsTheSame) {
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool_);
  world.write(200);
  const auto saved = make_with_artefact(GetParam(), geometry),
             loaded = make_with_artefact(GetParam(), geometry);
  saved->build(0, world.store().layer(0));
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("index-" + std::to_string(getpid()));
  {
    ContainerWriter out(path);
    SectionWriter sections(out, "select/3/");
    saved->save(0, sections);
    out.finish();
  }
  {
    const ContainerReader in(path);
    SectionReader sections(in, "select/3/");
    loaded->load(0, sections, world.store().layer(0));
  }
  std::filesystem::remove(path);
  world.write(40);
  const QueryBlock block = world.block(200, 40);
  EXPECT_EQ(select(*loaded, block, geometry), select(*saved, block, geometry));
  for (Selector* selector : {saved.get(), loaded.get()}) selector->roll_back(0, 200);
  world.store().roll_back(200);
  world.write(3);
  EXPECT_EQ(select(*loaded, world.block(200, 3), geometry), select(*saved, world.block(200, 3), geometry));
}

// What an attacker wrote is refused, and then what was there stays, or it is an index like any other: every
// access stays inside it, and it names far keys only, each once.
TEST_P(EveryMethod, ForgedIndexIsRefusedOrServes) {
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool_);
  world.write(200);
  const auto selector = make_with_artefact(GetParam(), geometry);
  selector->build(0, world.store().layer(0));
  const IndexSections sections = saved_sections(*selector);
  if (sections.empty()) return;
  constexpr std::array<std::uint64_t, 12> kValues = {
      0, 1, 2, 63, 64, 200, 211, 0x7fffffff, 0x80000000, 0x7fc00000, 0x7f800000, 1ULL << 32};
  Rng rng(11);
  world.write(10);
  for (int attempt = 0; attempt < 200; ++attempt) {
    IndexSections forged = sections;
    for (std::uint64_t changes = 1 + rng.below(3); changes > 0; --changes) {
      const Forgery forgery = {
          .section = static_cast<std::uint8_t>(rng.below(sections.size())),
          .kind = static_cast<std::uint8_t>(rng.below(5)),
          .place = static_cast<std::uint16_t>(rng.below(rng.below(2) == 0 ? 8 : 1 << 16)),
          .value = rng.below(2) == 0 ? kValues[rng.below(kValues.size())] : ~rng.below(300)};
      forgery.apply(forged);
    }
    try {
      load_sections(*selector, forged, world.store().layer(0));
    } catch (const InputError&) {
      // What it had before is what serves now.
    }
    select(*selector, world.block(200, 10), geometry);
    selector->roll_back(0, 150);
  }
}

TEST_P(EveryMethod, TinyTexts) {
  for (const std::int64_t context : {0, 1, 2, 3, 17, 18}) {
    World world({.kv_heads = 1, .group = 2, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool_);
    const auto selector = make_with_artefact(GetParam(), geometry);
    if (context > 0) world.write(context);
    selector->build(0, world.store().layer(0));
    selector->roll_back(0, context);
    for (int step = 0; step < 40; ++step) {
      world.write(1);
      const std::vector<FarSet> found =
          select(*selector, world.block(static_cast<Position>(world.tokens() - 1), 1), geometry);
      const std::int64_t far = std::max<std::int64_t>(0, world.tokens() - 17);
      for (const FarSet& set : found) EXPECT_LE(std::ssize(set), far);
    }
    selector->roll_back(0, 0);
    world.store().roll_back(0);
    world.write(30);
    select(*selector, world.block(0, 30), geometry);
  }
}

TEST_P(EveryMethod, WithoutBuildingNothingIsLost) {
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool_);
  const auto selector = make_with_artefact(GetParam(), geometry);
  selector->roll_back(0, 0);  // of a sequence never seen
  world.write(60);
  select(*selector, world.block(0, 60), geometry);
  EXPECT_GE(selector->index_bytes(), 0);
}

/// What `inspect` says is what an index takes once its text is read: queries that it keeps count as well.
TEST_P(EveryMethod, MemoryIsForetold) {
  constexpr std::int64_t kTokens = 3000;
  World world({.kv_heads = 2, .group = 4, .d = 64, .type = DType::f16, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool_);
  const auto selector = make_with_artefact(GetParam(), geometry);
  world.write(kTokens);
  tell(*selector, world, kTokens);
  selector->build(0, world.store().layer(0));
  const Spec spec = with_artefact(GetParam(), geometry);
  const MethodInfo& info = find_method(spec.name);
  const std::int64_t foretold = info.index_bytes ? info.index_bytes(spec, geometry, kTokens) : 0;
  EXPECT_LE(static_cast<double>(selector->index_bytes()), 1.25 * static_cast<double>(foretold) + 1024);
  EXPECT_GE(2 * selector->index_bytes() + 1024, foretold);
}

TEST_P(EveryMethod, EqualKeysAndKeysThatAreNotNumbers) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::function<float(Position, int, int, float)>> worlds = {
      [](Position, int, int, float) { return 1.0f; },
      [](Position, int, int, float) { return 0.0f; },
      [=](Position p, int, int, float x) { return p % 5 == 0 ? nan : x; },
      [=](Position p, int, int i, float x) { return p % 7 == 0 && i == 3 ? -inf : x; },
      [](Position p, int, int, float x) { return p % 3 == 0 ? x * 1e37f : x; },
      [=](Position, int, int, float) { return nan; },
  };
  for (const DType type : {DType::f32, DType::q8, DType::q4}) {
    for (const auto& shape_key : worlds) {
      World world({.type = type, .dense = {1, 16}});
      world.shape_key = shape_key;
      const LayerGeometry geometry = world.geometry(pool_);
      const auto selector = make_with_artefact(GetParam(), geometry);
      world.write(120);
      selector->build(0, world.store().layer(0));
      const auto loaded = make_with_artefact(GetParam(), geometry);
      load_sections(*loaded, saved_sections(*selector), world.store().layer(0));
      world.write(20);
      const QueryBlock block = world.block(120, 20);
      EXPECT_EQ(select(*loaded, block, geometry), select(*selector, block, geometry));
    }
  }
}

TEST_P(EveryMethod, HeadDimensionsAndGroups) {
  const double tolerance = output_tolerance(DType::f16);
  for (const auto& [group, d] : {std::pair{1, 64}, {2, 80}, {4, 96}, {5, 128}, {8, 256}, {16, 64}}) {
    World world({.kv_heads = 2, .group = group, .d = d, .type = DType::f16, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool_);
    const auto selector = make_with_artefact(GetParam(), geometry);
    world.write(100);
    selector->build(0, world.store().layer(0));
    world.write(2);
    const QueryBlock block = world.block(100, 2);
    Selection out;
    selector->append(0, block.kv, block.far_end(1, geometry.dense));
    selector->select({&block, 1}, out);
    std::vector<float> output(block.q.size(), std::nanf(""));
    float* const place = output.data();
    attend({&block, 1}, out, geometry, {&place, 1});
    const std::vector<FarSet> far = far_sets(out, block, geometry);
    for (int h = 0; h < geometry.query_heads; ++h) {
      const std::vector<double> expected = attend_exactly(
          world, block, geometry, 1, h, far[static_cast<std::size_t>(geometry.query_heads + h)]);
      for (int i = 0; i < d; ++i) {
        ASSERT_NEAR(output[static_cast<std::size_t>((geometry.query_heads + h) * d + i)],
                    expected[static_cast<std::size_t>(i)], tolerance);
      }
    }
  }
}

// Of a text that another takes the place of nothing shows once that is indexed.
TEST_P(EveryMethod, AnotherTextInItsPlace) {
  for (const std::int64_t tokens : {260, 70}) {
    World old({.dense = {1, 16}}, 1), world({.dense = {1, 16}}, 2);
    const LayerGeometry geometry = world.geometry(pool_);
    old.write(300);
    world.write(tokens);
    const auto lived = make_with_artefact(GetParam(), geometry),
               fresh = make_with_artefact(GetParam(), geometry);
    tell(*lived, old, 300);
    lived->build(0, old.store().layer(0));
    old.write(40);
    select(*lived, old.block(300, 40), geometry);
    lived->roll_back(0, 310);
    lived->roll_back(0, 0);
    for (Selector* selector : {lived.get(), fresh.get()}) {
      tell(*selector, world, tokens);
      selector->build(0, world.store().layer(0));
    }
    world.write(30);
    const QueryBlock block = world.block(static_cast<Position>(tokens), 30);
    EXPECT_EQ(select(*lived, block, geometry), select(*fresh, block, geometry)) << tokens;
  }
}

// Queries that are not numbers, alone and beside others, whose keys stay theirs.
TEST_P(EveryMethod, QueriesThatAreNotNumbers) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {nan, inf, -inf, 1e38f, 0.0f}) {
    for (const bool all : {true, false}) {
      World world({.kv_heads = 2, .group = 3, .dense = {1, 16}});
      const LayerGeometry geometry = world.geometry(pool_);
      world.write(300);
      const auto selector = make_with_artefact(GetParam(), geometry);
      const auto spoil = [&](QueryBlock& block, std::vector<float>& q, std::vector<float>& q_unrotated) {
        q.assign(block.q.begin(), block.q.end());
        q_unrotated.assign(block.q_unrotated.begin(), block.q_unrotated.end());
        for (std::size_t i = 0; i < q.size(); i += all ? 1 : 7) q[i] = q_unrotated[i] = bad;
        block.q = q;
        block.q_unrotated = q_unrotated;
      };
      std::vector<float> q, q_unrotated;
      QueryBlock heard = world.block(0, 280);
      spoil(heard, q, q_unrotated);
      if (selector->wants_writes()) tell(*selector, heard);
      world.store().roll_back(280);
      build_whole(parse_spec(GetParam() == "plan:made" ? "topk" : GetParam()).name, *selector, world);
      world.write(20);
      for (const Phase phase : {Phase::question, Phase::generation}) {
        QueryBlock block = world.block(280, 20);
        block.phase = phase;
        std::vector<float> own, own_unrotated;
        spoil(block, own, own_unrotated);
        select(*selector, block, geometry);
      }
    }
  }
}

// What one sequence goes through leaves the others as they are.
TEST_P(EveryMethod, SequencesDoNotMatterToEachOther) {
  const WorldShape shape = {.kv_heads = 2, .group = 2, .dense = {1, 16}};
  World first(shape, 1, 0), second(shape, 2, 5);
  const LayerGeometry geometry = first.geometry(pool_);
  const auto alone = make_with_artefact(GetParam(), geometry),
             shared = make_with_artefact(GetParam(), geometry);
  first.write(220);
  second.write(140);
  for (Selector* selector : {alone.get(), shared.get()}) selector->build(0, first.store().layer(0));
  shared->build(5, second.store().layer(0));
  for (int step = 0; step < 12; ++step) {
    first.write(7);
    second.write(3);
    select(*shared, second.block(static_cast<Position>(second.tokens() - 3), 3), geometry);
    if (step % 4 == 3) {
      second.store().roll_back(step == 7 ? 20 : second.tokens() - 10);
      shared->roll_back(5, second.tokens());
      if (step == 7) shared->build(5, second.store().layer(0));
    }
    const QueryBlock block = first.block(static_cast<Position>(first.tokens() - 7), 7);
    EXPECT_EQ(select(*shared, block, geometry), select(*alone, block, geometry)) << step;
  }
}

// A share of the far keys may be less than one key.
TEST(Budgets, SharesOfLessThanAKey) {
  ThreadPool pool(2);
  for (const std::int64_t tokens : {20, 40, 400}) {
    World world({.kv_heads = 2, .group = 2, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(tokens);
    for (const char* spec : {"topk:k=1e-9",
                             "topk:k=1e-9,per=kv-head",
                             "random:fraction=1e-9",
                             "kmeans:clusters=1e-9",
                             "hash:weights=made,budget=1e-9",
                             "hash:weights=made,mode=combined,budget=1e-9",
                             "hyperplanes:budget=1e-9,ties=all",
                             "kdeformer:bucket_size=1e-9",
                             "reformer:bucket_size=1e-9",
                             "h2o:heavy_ratio=1e-9,recent_ratio=1e-9",
                             "snapkv:window_size=1,max_capacity_prompt=1e-9",
                             "ivf:k=1e-9,nlist=1e-9",
                             "hnsw:k=1e-9",
                             "retrieval:k=1e-9",
                             "retrieval:k=1e-9,beam=1",
                             "quest:budget=1e-9",
                             "double-sparsity:budget=1e-9",
                             "double-sparsity:budget=1e-9,per=kv-head",
                             "pqcache:budget=1e-9",
                             "infllm:budget=1e-9",
                             "squeezed:clusters=1e-9"}) {
      SCOPED_TRACE(spec);
      const auto selector = make_with_artefact(spec, geometry);
      tell(*selector, world, tokens);
      selector->build(0, world.store().layer(0));
      select(*selector, world.block(static_cast<Position>(tokens - 1), 1), geometry);
    }
  }
}

// Budgets that cover all far keys give full attention's bits.
TEST(Budgets, EverythingIsFullAttentionToTheBit) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 4, .type = DType::f16, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  for (const char* spec : {"topk:k=1000000",
                           "topk:k=1.0",
                           "topk:k=100%,by=value",
                           "topk:mass=1",
                           "topk:mass=1,per=kv-head",
                           "random:fraction=1.0",
                           "random:fraction=5000",
                           "kmeans:probes=100000",
                           "kmeans:clusters=1,probes=1",
                           "hash:weights=made,budget=1.0",
                           "hash:weights=made,budget=5000,per=query-head",
                           "hash:weights=made,mode=depth,depth=128",
                           "hyperplanes:mode=combined,budget=100%,depth=128",
                           "kdeformer:bucket_size=100%",
                           "reformer:bucket_size=5000",
                           "h2o:heavy_ratio=100%",
                           "snapkv:max_capacity_prompt=100%",
                           "ivf:nprobe=100000,k=100%",
                           "hnsw:k=5000",
                           "saap:probes=24",
                           "saap:probes=100000,group=independent",
                           "retrieval:k=100000",
                           "retrieval:mass=1",
                           "retrieval:k=1.0,per=query-head",
                           "quest:budget=1.0",
                           "quest:budget=1000,bits=4,per=kv-head",
                           "double-sparsity:budget=1.0",
                           "double-sparsity:budget=1000,per=kv-head",
                           "pqcache:budget=1.0",
                           "infllm:topk=1000",
                           "infllm:budget=100%,block_size=16,per=kv-head"}) {
    const auto selector = make_with_artefact(spec, geometry);
    selector->build(0, world.store().layer(0));
    for (const std::int64_t tokens : {1, 6}) {
      const QueryBlock block = world.block(static_cast<Position>(200 - tokens), tokens);
      Selection out;
      selector->append(0, block.kv, block.far_end(tokens - 1, geometry.dense));
      selector->select({&block, 1}, out);
      std::vector<float> sparse(block.q.size()), full(block.q.size());
      float* place = sparse.data();
      const AttendWork work = attend({&block, 1}, out, geometry, {&place, 1});
      place = full.data();
      attend_full({&block, 1}, geometry, {&place, 1});
      EXPECT_EQ(sparse, full) << spec;
      EXPECT_EQ(work.far_keys, work.far_total) << spec;
    }
  }
}

}  // namespace
}  // namespace lode::test
