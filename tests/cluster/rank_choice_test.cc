// SPDX-License-Identifier: Apache-2.0
// The best of all ranks' keys are those that one machine chooses: of made-up scores, and by every method that chooses
// over ranks.
#include "select/rank_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>

#include "cluster/local_ranks.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "support/hash_file.h"
#include "support/rank_choice.h"
#include "support/saap.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Scores with many ties, some infinite, some no numbers.
std::vector<float> some_scores(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> scores;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t kind = rng.below(16);
    scores.push_back(kind == 0   ? kNan
                     : kind == 1 ? -std::numeric_limits<float>::infinity()
                     : kind < 8  ? static_cast<float>(rng.below(5))
                                 : static_cast<float>(rng.normal()));
  }
  return scores;
}

/// What one of some ranks has of a choice among scores that lie on all of them.
RankedKeys part_of(std::span<const float> scores, std::int64_t budget, const Share& own) {
  std::vector<Position> rows;
  top_k(scores.subspan(static_cast<std::size_t>(own.begin), static_cast<std::size_t>(own.count())), budget,
        static_cast<Position>(own.begin), rows);
  RankedKeys keys = {.budget = budget, .keys = {}};
  for (const Position row : rows) keys.keys.push_back(ranked_key(scores[static_cast<std::size_t>(row)], row));
  std::ranges::sort(keys.keys, std::greater<>());
  return keys;
}

TEST(RankChoice, TheBestOfAllRanksAreThoseOfOneMachine) {
  for (const int size : {1, 2, 3, 4, 7, 16}) {
    for (const std::int64_t count : {1, 30, 700, 20000}) {
      std::vector<std::vector<float>> scores;
      std::vector<std::int64_t> budgets;
      for (const std::int64_t budget :
           {std::int64_t{1}, std::int64_t{33}, count / 3, count - 1, count, count + 5}) {
        if (budget <= 0) continue;
        scores.push_back(some_scores(count, hash_seed(5, count, budget)));
        budgets.push_back(budget);
      }
      std::vector<std::vector<std::vector<Position>>> found(static_cast<std::size_t>(size));
      run_local_ranks(size, [&](Communicator& ranks) {
        std::vector<RankedKeys> choices;
        for (std::size_t c = 0; c < scores.size(); ++c)
          choices.push_back(part_of(scores[c], budgets[c], share_of(count, ranks.rank(), size)));
        const std::vector<ChosenKeys> chosen = choose_over_ranks(ranks, choices);
        for (std::size_t c = 0; c < scores.size(); ++c) {
          auto& rows = found[static_cast<std::size_t>(ranks.rank())].emplace_back();
          for (const std::uint64_t key : choices[c].keys)
            if (key >= chosen[c].last) rows.push_back(row_of(key));
        }
        EXPECT_LE(ranks.sent().messages, 8 * (size - 1)) << count << " scores over " << size;
      });
      for (std::size_t c = 0; c < scores.size(); ++c) {
        std::vector<Position> all, alone;
        for (const auto& of_rank : found) all.insert(all.end(), of_rank[c].begin(), of_rank[c].end());
        std::ranges::sort(all);
        top_k(scores[c], budgets[c], 0, alone);
        EXPECT_EQ(all, alone) << budgets[c] << " of " << count << " over " << size;
      }
    }
  }
}

/// All keys and values of a rank that has a share of a text; the others' are no numbers.
World rank_world(const WorldShape& shape, const Share& own, std::int64_t document) {
  World world(shape);
  world.shape_key = [=](Position p, int, int, float x) {
    return p >= document || (p >= own.begin && p < own.end) ? x : kNan;
  };
  return world;
}

/// Far keys of a question behind the document, by a selector of the keys up to `end`.
std::vector<FarSet> choice_in(Selector& selector, World& world, std::int64_t document, std::int64_t end,
                              const LayerGeometry& geometry) {
  const auto rows = [&](std::int64_t tokens) {
    std::vector<KvRows> heads(world.store().layer(0).heads.begin(), world.store().layer(0).heads.end());
    for (KvRows& head : heads) head.rows = tokens;
    return heads;
  };
  const std::vector<KvRows> indexed = rows(end), all = rows(document);
  selector.build(0, {.heads = indexed, .tokens = end});
  selector.append(0, {.heads = indexed, .tokens = end}, static_cast<Position>(end));
  QueryBlock block = world.block(static_cast<Position>(document), 5);
  block.kv = {.heads = all, .tokens = document};
  block.far_limit = static_cast<Position>(document);
  return choice_of(selector, block, geometry);
}

class OverRanks : public testing::TestWithParam<std::string> {
 protected:
  static constexpr std::int64_t kDocument = 500;
  const WorldShape shape_ = {.dense = {.sink = 3, .window = 16}};
  ThreadPool pool_{1};

  /// With an artefact made for the geometry, where the method needs one.
  static Spec spec_for(const LayerGeometry& geometry) {
    Spec spec = parse_spec(GetParam());
    if (spec.name == "hash") spec.given["weights"] = hash_file(geometry).string();
    if (spec.name == "saap")
      spec.given["weights"] = SaapFiles::of({.kv_heads = geometry.kv_heads, .d = geometry.head_dim});
    return spec;
  }
  static std::unique_ptr<Selector> made(const Spec& spec, const LayerGeometry& geometry) {
    return find_method(spec.name).make(spec, geometry, "model");
  }
  static std::filesystem::path hash_file(const LayerGeometry& geometry) {
    static const std::filesystem::path path = write_hash_file(geometry, {.values = HashScheme::Values::norm});
    return path;
  }
};

TEST_P(OverRanks, TheUnionOfAllRanksIsOneMachinesChoice) {
  World alone(shape_);
  alone.write(kDocument + 5);
  const LayerGeometry geometry = alone.geometry(pool_);
  const Spec spec = spec_for(geometry);
  const auto selector = made(spec, geometry);
  const std::vector<FarSet> wanted = choice_in(*selector, alone, kDocument, kDocument, geometry);
  for (const int size : {1, 2, 3, 4, 7, 300}) {
    if (size == 300 && GetParam() != "topk:k=5")
      continue;  // ranks in the sink, in the window, and of two keys
    std::vector<std::vector<FarSet>> found(static_cast<std::size_t>(size));
    run_local_ranks(size, [&](Communicator& ranks) {
      ThreadPool pool(1);
      const Share own = token_share(kDocument, ranks.rank(), size);
      World world = rank_world(shape_, own, kDocument);
      world.write(kDocument + 5);
      const LayerGeometry g = world.geometry(pool);
      const auto part = made(spec, g);
      ASSERT_TRUE(divide_keys(part.get(), {&ranks, kDocument, own}));
      found[static_cast<std::size_t>(ranks.rank())] = choice_in(*part, world, kDocument, own.end, g);
    });
    expect_union(found, wanted, kDocument);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Methods, OverRanks,
    testing::Values("streaming", "topk:k=5", "topk:k=10%", "topk:k=7,by=value", "topk:k=4000",
                    "random:fraction=17", "random:fraction=70%", "kmeans:probes=2",
                    "kmeans:clusters=40,probes=5,rope=on", "kmeans:clusters=10%,probes=3",
                    "ivf:nlist=12,nprobe=3,k=10", "ivf:k=5%,nprobe=1", "hyperplanes:budget=20%",
                    "hyperplanes:bits=128,budget=11,per=query-head,rope=off", "hyperplanes:budget=9,ties=all",
                    "hash:budget=20%", "hash:budget=9,per=query-head,ties=all", "saap:probes=3",
                    "saap:probes=2,group=independent,rank=key", "hash:mode=depth,depth=1",
                    "hash:mode=combined,budget=15,depth=2"),
    [](const auto& info) {
      std::string name = info.param;
      std::ranges::replace_if(
          name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
      return name;
    });

TEST(RankChoice, MethodsThatNeedAllKeysSaySo) {
  World world({});
  ThreadPool pool(1);
  for (const char* spec :
       {"topk:mass=0.6", "topk:k=5,per=kv-head", "quest", "retrieval", "squeezed", "infllm"}) {
    const auto selector = make(spec, world.geometry(pool));
    EXPECT_FALSE(divide_keys(selector.get(), {})) << spec;
  }
}

}  // namespace
}  // namespace lode::test
