// SPDX-License-Identifier: Apache-2.0
// Questions about a document whose rows are shared out over ranks: what one machine answers, but for rounding.
#include "cluster/shard_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cluster/local_ranks.h"
#include "engine/batch.h"
#include "engine/document.h"
#include "kernels/bf16_product.h"
#include "lodestone/error.h"
#include "support/compare.h"
#include "support/family_folder.h"
#include "support/some_tokens.h"

namespace lode {
namespace {

constexpr float kTolerance = 2e-4f;  // the parts of a sum are added in another order
// A new row's numbers may then round to the next one of the store's type; with a matrix unit, inputs of products, too.
const float kRounded = bf16_product_kernels() == nullptr ? 2e-2f : 6e-2f;

class ShardAttentionTest : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 301;
  std::shared_ptr<const Model> model_ = Model::random("L2q4kv2d16", 2);

  std::shared_ptr<const Document> document(const std::string& spec, DType type = DType::f32,
                                           std::int64_t tokens = kTokens) const {
    return Document::read(model_, some_tokens(tokens, 1), "",
                          {.specs = {parse_spec(spec)}, .kv_type = type, .max_tokens = 1024});
  }

  /// Logits of a question and of two tokens behind it, one at a time; `work` is that of all.
  std::vector<float> logits(const std::shared_ptr<const Document>& document, const std::string& spec,
                            ForwardWork* work = nullptr) const {
    BatchRunner runner(model_);
    Sequence sequence(document, parse_spec(spec), 32);
    std::vector<float> all;
    const std::vector<TokenId> question = some_tokens(9, 2), answer = some_tokens(2, 3);
    const auto run = [&](std::span<const TokenId> tokens, Phase phase) {
      BatchRow row = {.sequence = &sequence, .tokens = tokens, .phase = phase, .rows = LogitRows::all};
      runner.run({&row, 1});
      if (row.error) std::rethrow_exception(row.error);
      all.insert(all.end(), row.logits.begin(), row.logits.end());
      if (work != nullptr) {
        work->attend += row.work.attend;
        work->select.bytes += row.work.select.bytes;
      }
    };
    run(question, Phase::question);
    for (const TokenId& token : answer) run({&token, 1}, Phase::generation);
    return all;
  }

  /// What each of some ranks gets; all must get the same bits.
  std::vector<float> logits_of_ranks(int size, const std::string& spec, DType type = DType::f32,
                                     Traffic* traffic = nullptr) const {
    std::vector<std::vector<float>> by_rank(static_cast<std::size_t>(size));
    run_local_ranks(size, [&](Communicator& ranks) {
      const auto own = document(spec, type);
      share_out(*own, ranks);
      by_rank[static_cast<std::size_t>(ranks.rank())] = logits(own, spec);
      if (traffic != nullptr && ranks.rank() == 0) *traffic = ranks.sent();
    });
    for (const auto& other : by_rank) EXPECT_EQ(other, by_rank.front()) << spec << " over " << size;
    return by_rank.front();
  }
};

TEST_F(ShardAttentionTest, EveryMethodChoosesAsOnOneMachine) {
  for (const char* spec :
       {"full", "streaming:window=20", "streaming:sink=150,window=200", "topk:k=5,window=20",
        "topk:k=300,window=7", "kmeans:clusters=8,probes=3,window=20", "random:fraction=0.25,window=20",
        "squeezed:clusters=20%,sparsity=0.5", "squeezed:clusters=20%,sparsity=0.5,tail=on",
        "ideal:sparsity=0.5,block=4", "quest:page_size=8,budget=64,window=20",
        "retrieval:k=9,sink=1,window=20", "magicpig:window=20", "infllm:window=20", "hnsw:k=9,window=20"}) {
    const std::vector<float> alone = logits(document(spec), spec);
    const bool plain = std::string(spec) == "full" || std::string(spec) == "topk:k=5,window=20";
    for (const int size : plain ? std::vector<int>{1, 2, 3, 4, 7} : std::vector<int>{2, 5})
      EXPECT_LT(worst_difference(logits_of_ranks(size, spec), alone), kTolerance) << spec << " over " << size;
  }
}

TEST_F(ShardAttentionTest, KeysOfEveryTypeAreSharedOut) {
  for (const DType type : {DType::f16, DType::bf16, DType::q8}) {
    const std::vector<float> alone = logits(document("full", type), "full");
    EXPECT_LT(worst_difference(logits_of_ranks(3, "full", type), alone), kRounded) << name_of(type);
  }
}

TEST_F(ShardAttentionTest, TheSameBitsEachTimeForOneNumberOfRanks) {
  const std::vector<float> once = logits_of_ranks(4, "topk:k=20,window=20");
  for (int again = 0; again < 3; ++again) EXPECT_EQ(logits_of_ranks(4, "topk:k=20,window=20"), once);
}

TEST_F(ShardAttentionTest, MessagesAreNoLargerThanTwoStatesATokenAndLayer) {
  for (const int size : {2, 4, 7}) {
    Traffic traffic;
    logits_of_ranks(size, "full", DType::f32, &traffic);
    const std::int64_t tokens = 11, layers = 2, heads = 4, d = 16;
    EXPECT_GT(traffic.bytes, 0);
    EXPECT_LE(traffic.bytes, tokens * layers * 2 * heads * (d + 1) * 4) << size;
    EXPECT_LE(traffic.messages, 3 * layers * 2 * (size - 1)) << size;  // three steps
  }
}

TEST_F(ShardAttentionTest, WorkIsCountedAsOnOneMachine) {
  for (const char* spec : {"full", "topk:k=5,window=20"}) {
    ForwardWork alone;
    logits(document(spec), spec, &alone);
    run_local_ranks(3, [&](Communicator& ranks) {
      const auto own = document(spec);
      share_out(*own, ranks);
      ForwardWork work;
      logits(own, spec, &work);
      EXPECT_EQ(work.attend.kv_bytes, alone.attend.kv_bytes) << spec;
      EXPECT_EQ(work.attend.far_keys, alone.attend.far_keys) << spec;
      EXPECT_EQ(work.attend.full_bytes, alone.attend.full_bytes) << spec;
      EXPECT_EQ(work.select.bytes, alone.select.bytes) << spec;
    });
  }
}

/// Models with windows, sinks (whose logit is added to the log-sum-exp of all ranks) and latent rows.
TEST(ShardAttentionFamilies, EveryFamilyAnswersAsOnOneMachine) {
  for (const char* family : {"gpt-oss", "gemma3", "mistral-window", "deepseek-v3", "granite"}) {
    const FamilyFolder folder(family);
    const auto model = folder.load();
    const auto logits = [&](const std::shared_ptr<const Document>& document) {
      BatchRunner runner(model);
      Sequence sequence(document, parse_spec("full"), 32);
      std::vector<TokenId> question = {5, 9, 12, 3, 60};
      BatchRow row = {
          .sequence = &sequence, .tokens = question, .phase = Phase::question, .rows = LogitRows::all};
      runner.run({&row, 1});
      if (row.error) std::rethrow_exception(row.error);
      return std::vector<float>(row.logits.begin(), row.logits.end());
    };
    const auto document = [&] {
      std::vector<TokenId> tokens;
      for (TokenId i = 0; i < 150; ++i) tokens.push_back((i * i + 3 * i + i / 7) % 64);
      return Document::read(model, tokens, "", {.kv_type = DType::f32, .max_tokens = 256});
    };
    const std::vector<float> alone = logits(document());
    for (const int size : {2, 3}) {
      std::vector<std::vector<float>> found(static_cast<std::size_t>(size));
      run_local_ranks(size, [&](Communicator& ranks) {
        const auto own = document();
        share_out(*own, ranks);
        found[static_cast<std::size_t>(ranks.rank())] = logits(own);
      });
      for (const auto& own : found) EXPECT_EQ(own, found.front()) << family;
      EXPECT_LT(relative_difference(found.front(), alone), kTolerance) << family << " over " << size;
    }
  }
}

TEST_F(ShardAttentionTest, WhatRanksCannotShareIsRefused) {
  EXPECT_THROW(logits_of_ranks(2, "h2o:window=20"), InputError);
  const auto small = document("full", DType::f32, 3);
  EXPECT_THROW(run_local_ranks(4, [&](Communicator& ranks) { share_out(*small, ranks); }), InputError);
}

}  // namespace
}  // namespace lode
