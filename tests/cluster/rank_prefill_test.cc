// SPDX-License-Identifier: Apache-2.0
// A text that ranks read together: their keys are one machine's but for rounding, and what they write is read back by
// any number of ranks and by one process.
#include "cluster/rank_prefill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/file.h"
#include "cluster/local_ranks.h"
#include "cluster/save_shards.h"
#include "cluster/shard_attention.h"
#include "engine/batch.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "kernels/kv_row.h"
#include "lodestone/error.h"
#include "support/compare.h"
#include "support/family_folder.h"
#include "support/ranks_text.h"
#include "support/refusal.h"
#include "support/some_tokens.h"

namespace lode {
namespace {

TEST(PrefillPlan, PiecesCoverTheTextAndAreAlike) {
  for (const std::int64_t tokens : {7, 8, 100, 4097}) {
    for (const int ranks : {1, 2, 3, 7}) {
      for (const std::int64_t chunk : {1, 16, 512}) {
        const PrefillPlan plan = {.tokens = tokens, .chunk = chunk, .ranks = ranks};
        std::vector<int> readers(static_cast<std::size_t>(tokens));
        for (std::int64_t c = 0; c < plan.chunks(); ++c) {
          for (int r = 0; r < ranks; ++r) {
            const Share piece = plan.piece_of(c, r);
            EXPECT_GE(piece.count(), 1);
            EXPECT_LE(piece.count(), std::max<std::int64_t>(chunk, 2));
            for (std::int64_t t = piece.begin; t < piece.end; ++t) ++readers[static_cast<std::size_t>(t)];
          }
        }
        EXPECT_THAT(readers, testing::Each(1)) << tokens << " tokens over " << ranks << " by " << chunk;
      }
    }
  }
}

/// The share of (query, earlier key) pairs that the busiest rank has, in shares of an even one.
TEST(PrefillPlan, RanksHaveAboutAsManyPairsOfQueriesAndKeys) {
  for (const int ranks : {2, 4, 7}) {
    const PrefillPlan plan = {.tokens = 20000, .chunk = 256, .ranks = ranks};
    std::vector<double> pairs(static_cast<std::size_t>(ranks));
    double all = 0;
    for (std::int64_t c = 0; c < plan.chunks(); ++c) {
      const Share chunk = plan.chunk_at(c);
      for (int r = 0; r < ranks; ++r) {
        double rows = 0;
        for (std::int64_t before = 0; before < c; ++before)
          rows += static_cast<double>(plan.piece_of(before, r).count());
        const Share piece = plan.piece_of(c, r);
        const double own = rows * static_cast<double>(chunk.count()) +
                           static_cast<double>(piece.count() * (chunk.end - piece.end)) +
                           static_cast<double>(piece.count() * (piece.count() + 1)) / 2;
        pairs[static_cast<std::size_t>(r)] += own;
        all += own;
      }
    }
    for (const double own : pairs) EXPECT_LT(own * ranks / all, 1.02) << ranks;
    for (const double own : pairs) EXPECT_GT(own * ranks / all, 0.98) << ranks;
  }
}

class RankPrefillTest : public test::RanksText {
 protected:
  void TearDown() override { remove_files(); }
  void save_over(int size, DType type = DType::f32, const std::string& id = kShardId) const {
    run_local_ranks(size, [&](Communicator& ranks) {
      Context context = read(ranks, type);
      save(context, ranks, id);
    });
  }
};

/// What the last bits of products may change in a row: where it is rounded to levels, a number on the border
/// between two becomes the other one.
float tolerance(DType type, const std::vector<float>& row) {
  float largest = 0.0f;
  for (const float x : row) largest = std::max(largest, std::abs(x));
  switch (type) {
    case DType::f32:
      return 1e-4f;
    case DType::q8:
      return std::max(3e-2f, 1.1f * largest / 127);
    case DType::q4:
      return 0.8f;
    default:
      return 3e-2f;
  }
}

TEST_F(RankPrefillTest, KeysAndValuesAreThoseOfOneMachineButForRounding) {
  for (const DType type : {DType::f32, DType::f16, DType::q8, DType::q4}) {
    // Ranks read rows of q4 as they are coded, one machine its own chunk's as they are before: there ranks are compared.
    std::optional<Context> alone;
    if (type == DType::q4)
      run_local_ranks(1, [&](Communicator& rank) { alone.emplace(read(rank, type)); });
    else
      alone.emplace(model_, options(type)).prefill(tokens_);
    for (const int size : {1, 2, 3, 7}) {
      run_local_ranks(size, [&](Communicator& ranks) {
        const Context context = read(ranks, type);
        const Share own = context.impl().share.own;
        EXPECT_EQ(own, token_share(kTokens, ranks.rank(), size));
        std::vector<float> here(16), there(16);
        for (int layer = 0; layer < 2; ++layer) {
          for (std::size_t head = 0; head < 2; ++head) {
            const KvRows rows = context.impl().kv.layer(layer).heads[head],
                         wanted = alone->impl().kv.layer(layer).heads[head];
            for (std::int64_t row = own.begin; row < own.end; ++row) {
              read_key_row(rows, row, here.data());
              read_key_row(wanted, row, there.data());
              EXPECT_LT(worst_difference(here, there), tolerance(type, there))
                  << name_of(type) << " key " << row << " over " << size;
              read_value_row(rows, row, here.data());
              read_value_row(wanted, row, there.data());
              EXPECT_LT(worst_difference(here, there), tolerance(type, there))
                  << name_of(type) << " value " << row;
            }
          }
        }
      });
    }
  }
}

TEST_F(RankPrefillTest, ShardsAreReadBackByAnyNumberOfRanksAndByOneProcess) {
  save_over(3);
  const auto alone = open(nullptr);
  for (const Spec& spec : {parse_spec("full"), methods_[0], methods_[1], methods_[2]}) {
    const std::vector<float> wanted = logits(alone, spec);
    for (const int size : {1, 2, 3, 4, 7}) {
      std::vector<std::vector<float>> found(static_cast<std::size_t>(size));
      run_local_ranks(size, [&](Communicator& ranks) {
        const auto document = open(&ranks);
        found[static_cast<std::size_t>(ranks.rank())] = logits(document, spec);
      });
      for (const auto& own : found) EXPECT_EQ(own, found.front()) << spec.str() << " over " << size;
      EXPECT_LT(worst_difference(found.front(), wanted), kTolerance) << spec.str() << " over " << size;
    }
  }
}

TEST_F(RankPrefillTest, MethodsThatNeedAllKeysRunOverTheShards) {
  save_over(2);
  const Spec quest = parse_spec("quest:page_size=8,budget=64,window=20");
  const auto answer = [&](Communicator* ranks) {
    Context context = load_context(path_, model_, options(), LoadIndexes::all, ranks);
    context.attach(quest);
    context.build_indexes();
    const auto document = Document::Impl::share(std::move(context), {}, {});
    if (ranks != nullptr) share_out(*document, *ranks);
    return logits(document, quest);
  };
  const std::vector<float> alone = answer(nullptr);
  run_local_ranks(
      3, [&](Communicator& ranks) { EXPECT_LT(worst_difference(answer(&ranks), alone), kTolerance); });
}

TEST_F(RankPrefillTest, ShardsHoldEveryRowOnce) {
  for (const DType type : {DType::f32, DType::q8}) {
    save_over(4, type);
    const auto meta = read_context_meta(ContainerReader(path_), path_);
    ASSERT_EQ(meta.shards.shards.size(), 4u);
    std::int64_t kv = 0;
    for (const Shard& shard : meta.shards.shards) {
      const ContainerReader reader(path_.parent_path() / shard.file);
      for (const SectionInfo& s : reader.sections())
        if (s.name.starts_with("kv/")) kv += static_cast<std::int64_t>(s.bytes);
    }
    EXPECT_EQ(kv, meta.kv_bytes());
  }
}

TEST_F(RankPrefillTest, TheSameBitsEachTimeForOneNumberOfRanks) {
  std::vector<float> first;
  for (int again = 0; again < 3; ++again) {
    run_local_ranks(3, [&](Communicator& ranks) {
      Context context = read(ranks);
      context.build_indexes();
      const auto document = Document::Impl::share(std::move(context), {}, {});
      share_out(*document, ranks);
      const std::vector<float> own = logits(document, methods_[1]);
      if (ranks.rank() > 0) return;
      if (first.empty()) first = own;
      EXPECT_EQ(own, first);
    });
  }
}

TEST_F(RankPrefillTest, ShardsOfAnotherWritingAreRefused) {
  save_over(2, DType::f32, "0123456789abcdef");
  const std::filesystem::path old = path_.parent_path() / "old.lode";
  std::filesystem::rename(path_, old);
  save_over(2, DType::f32, "fedcba9876543210");
  const auto shard = [&](const char* id) { return path_.string() + "." + id + "-2of2"; };
  std::filesystem::copy_file(shard("fedcba9876543210"), shard("0123456789abcdef"),
                             std::filesystem::copy_options::overwrite_existing);
  test::expect_refused("'shard'", [&] { Context::load(old, model_, {}); });
  std::filesystem::remove(shard("0123456789abcdef"));
  EXPECT_THROW(Context::load(old, model_, {}), InputError);
  std::filesystem::remove(old);
}

TEST_F(RankPrefillTest, OnlyShardsOfOtherWritingsAreSweptAway) {
  save_over(2, DType::f32, "0123456789abcdef");
  save_over(2, DType::f32, "fedcba9876543210");
  const auto other = path_.string() + ".notes-1of2";
  std::ofstream(other) << "mine";
  remove_shards(path_, "fedcba9876543210", RemovedShards::all_others);
  EXPECT_FALSE(std::filesystem::exists(path_.string() + ".0123456789abcdef-1of2"));
  EXPECT_TRUE(std::filesystem::exists(path_.string() + ".fedcba9876543210-1of2"));
  EXPECT_TRUE(std::filesystem::exists(other));
  EXPECT_NO_THROW(open(nullptr));
  std::filesystem::remove(other);
}

TEST_F(RankPrefillTest, ShardsOfKilledRanksAreSweptAwayAndNothingElse) {
  const std::filesystem::path folder = path_.parent_path() / "sweep";
  std::filesystem::create_directory(folder);
  const auto put = [&](const std::string& name) { std::ofstream(folder / name) << "x"; };
  save_over(2, DType::f32, "0123456789abcdef");
  std::filesystem::rename(path_, folder / "renamed.lode");
  // Dead: a writing without a list, and one whose list has come. Alive: the third. No writing: the fourth.
  for (const char* id : {"fedcba9876543210", "0123456789abcdef", "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"})
    put(std::string("text.lode.") + id + "-1of2");
  put(".text.lode.fedcba9876543210-2of2.tmp");
  put(".text.lode.fedcba9876543210.tmp");
  put(".text.lode.0123456789abcdef.tmp");
  const AtomicFile alive(folder / "text.lode.aaaaaaaaaaaaaaaa");
  EXPECT_EQ(remove_dead_shards(folder), 2u);
  std::vector<std::string> left;
  for (const auto& one : std::filesystem::directory_iterator(folder))
    left.push_back(one.path().filename().string());
  std::ranges::sort(left);
  const std::vector<std::string> wanted = {
      ".text.lode.aaaaaaaaaaaaaaaa.tmp", "renamed.lode", "text.lode.0123456789abcdef-1of2",
      "text.lode.aaaaaaaaaaaaaaaa-1of2", "text.lode.bbbbbbbbbbbbbbbb-1of2"};
  EXPECT_EQ(left, wanted);
  std::filesystem::remove_all(folder);
}

TEST_F(RankPrefillTest, AMissingShardAndOneInPlaceOfItsTextAreNamed) {
  save_over(2, DType::f32, "0123456789abcdef");
  const std::string shard = path_.string() + ".0123456789abcdef-2of2";
  test::expect_refused("found shard 2 of 2 of it: name '" + path_.string() + "'",
                       [&] { Context::load(shard, model_, {}); });
  std::filesystem::remove(shard);
  test::expect_refused("its shard 2 of 2, '" + path_.filename().string() + ".0123456789abcdef-2of2'",
                       [&] { Context::load(path_, model_, {}); });
}

TEST_F(RankPrefillTest, MethodsThatRanksCannotShareAreRefusedBeforeAnythingIsRead) {
  test::expect_refused("without mpirun", [&] { expect_asked_over_ranks(model_, parse_spec("h2o")); });
  test::expect_refused("without mpirun", [&] { expect_shared_method(model_, parse_spec("h2o")); });
  test::expect_refused("ask that file over ranks",
                       [&] { expect_shared_method(model_, parse_spec("squeezed")); });
  EXPECT_NO_THROW(expect_asked_over_ranks(model_, parse_spec("squeezed")));
  for (const char* spec : {"full", "streaming", "topk:k=4", "kmeans", "hyperplanes", "ivf"})
    EXPECT_NO_THROW(expect_shared_method(model_, parse_spec(spec))) << spec;
}

TEST(RankPrefillFamilies, OtherLayersAreReadAsOnOneMachine) {
  for (const char* family : {"deepseek-v3", "granite", "qwen3-moe", "ministral3"}) {
    const FamilyFolder folder(family);
    const auto model = folder.load();
    std::vector<TokenId> tokens;
    for (TokenId i = 0; i < 150; ++i) tokens.push_back((i * i + 3 * i + i / 7) % 64);
    const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 256, .chunk = 8};
    Context alone(model, options);
    alone.prefill(tokens);
    run_local_ranks(3, [&](Communicator& ranks) {
      const Context context = read_over_ranks(model, options, tokens, {}, ranks);
      const Share own = context.impl().share.own;
      const int last = model->config().layers - 1;
      const KvRows rows = context.impl().kv.layer(last).heads[0],
                   wanted = alone.impl().kv.layer(last).heads[0];
      std::vector<float> here(static_cast<std::size_t>(rows.d)), there(here);
      for (std::int64_t row = own.begin; row < own.end; ++row) {
        read_key_row(rows, row, here.data());
        read_key_row(wanted, row, there.data());
        EXPECT_LT(worst_difference(here, there), 1e-3f) << family << " key " << row;
      }
    });
  }
}

TEST_F(RankPrefillTest, WhatRanksCannotShareIsRefused) {
  const auto over_two = [&](const std::shared_ptr<const Model>& model, std::span<const TokenId> tokens,
                            const char* spec) {
    const std::vector<Spec> methods = {parse_spec(spec)};
    run_local_ranks(2,
                    [&](Communicator& ranks) { read_over_ranks(model, options(), tokens, methods, ranks); });
  };
  EXPECT_THROW(over_two(model_, tokens_, "squeezed"), InputError);
  EXPECT_THROW(over_two(model_, std::span(tokens_).first(1), "full"), InputError);
  for (const char* family : {"gpt-oss", "qwen3-next"})
    EXPECT_THROW(over_two(FamilyFolder(family).load(), std::vector<TokenId>(40, 1), "full"), InputError);
}

}  // namespace
}  // namespace lode
