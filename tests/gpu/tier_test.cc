// SPDX-License-Identifier: Apache-2.0
// Keys and values in host memory beside a GPU: the same answers as with all of them there. Run on a GPU, and
// where there is none on one that the host plays (tests/gpu_fake).
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "lodestone/error.h"
#include "support/compare.h"
#include "support/gpu.h"

namespace lode {
namespace {

Context split_context(DType type, KvTier tier, std::int64_t max_tokens) {
  return Context(pocket(),
                 {.kv_type = type, .device = Device::cuda, .kv_tier = tier, .max_tokens = max_tokens});
}

class GpuTier : public testing::TestWithParam<const char*> {};

/// A text in chunks, a question of many tokens and one of one at a time, a dense question in between: host
/// memory gives what the GPU's gives, and the same bits again after rolling back.
TEST_P(GpuTier, LogitsAndWorkEqualThoseWithKeysOnTheGpu) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const KvTier tier : {KvTier::gpu, KvTier::host}) {
    Context context = split_context(DType::f32, tier, 2048);
    const MethodId method = context.attach(parse_spec(GetParam()));
    const std::vector<TokenId> text = story(900);
    context.prefill(std::span(text).first(600));
    context.prefill(std::span(text).subspan(600));
    context.build_indexes();
    const int at = tier == KvTier::host;
    EXPECT_EQ(context.impl().gpu->keys_on_host(), at == 1);
    logits[at] = context.forward(story(37), method, &work[at]);
    for (const TokenId token : story(5)) {
      WorkReport more;
      const auto row = context.forward({&token, 1}, method, &more);
      logits[at].insert(logits[at].end(), row.begin(), row.end());
      work[at] += more;
    }
    const auto dense = context.forward(story(20), kDense);
    logits[at].insert(logits[at].end(), dense.begin(), dense.end());
    context.roll_back(900);
    const auto again = context.forward(story(37), method);
    EXPECT_EQ(again, std::vector<float>(logits[at].begin(), logits[at].begin() + std::ssize(again)));
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
  EXPECT_EQ(work[0].far_total, work[1].far_total);
  EXPECT_NEAR(static_cast<double>(work[1].far_keys + 1) / static_cast<double>(work[0].far_keys + 1), 1.0,
              0.02);
}

INSTANTIATE_TEST_SUITE_P(Specs, GpuTier,
                         testing::Values("full", "streaming:window=64", "topk:k=40,window=64",
                                         "retrieval:k=40,sink=16,window=64", "topk:k=40,sink=0,window=1",
                                         "kmeans:clusters=32,probes=6,window=64,dense_layers=1",
                                         "squeezed:sparsity=0.8", "quest:budget=64,window=64",
                                         "h2o:window=64", "magicpig:window=64"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

// Walks so narrow take other ways over graphs whose last links differ, as those that a GPU builds do from the host's
// (Graphs.LinksAreThoseOfTheHost). Over graphs of one file they find the same keys.
TEST(Tier, NarrowWalksOverTheSameGraphsFindTheSameKeys) {
  NEEDS_GPU();
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("lodestone-tier-" + std::to_string(getpid()) + ".lode");
  {
    Context written = split_context(DType::f32, KvTier::gpu, 2048);
    written.attach(parse_spec("retrieval:k=40,beam=32,sink=16,window=64"));
    written.prefill(story(900));
    written.build_indexes();
    written.save(path, "");
  }
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const KvTier tier : {KvTier::gpu, KvTier::host}) {
    Context context = Context::load(
        path, pocket(), {.kv_type = DType::f32, .device = Device::cuda, .kv_tier = tier, .max_tokens = 2048});
    const int at = tier == KvTier::host;
    EXPECT_EQ(context.impl().gpu->keys_on_host(), at == 1);
    logits[at] = context.forward(story(37), 0, &work[at]);
  }
  std::filesystem::remove(path);
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
  EXPECT_EQ(work[1].far_keys, work[0].far_keys);
}

TEST(Tier, WithKeysInHostMemoryOnlyQueriesNewKeysAndStatesCross) {
  NEEDS_GPU();
  Context context = split_context(DType::f16, KvTier::host, 2048);
  const MethodId method = context.attach(parse_spec("topk:k=40,sink=4,window=64"));
  context.prefill(story(900));
  context.build_indexes();
  context.forward(story(1), method);  // brings sink and window
  WorkReport work;
  const TokenId token = story(1)[0];
  context.forward({&token, 1}, method, &work);
  const ModelConfig& m = pocket()->config();
  const std::int64_t d = m.head_dim, f = sizeof(float);
  EXPECT_EQ(work.tiers.bytes_to_host, m.layers * (2 * m.query_heads + 2 * m.kv_heads) * d * f);
  EXPECT_EQ(work.tiers.bytes_to_gpu, m.layers * m.query_heads * (d + 1) * f);
  EXPECT_EQ(work.tiers.gpu_keys, m.layers * m.kv_heads * (4 + 64));
  EXPECT_EQ(work.tiers.host_keys, work.far_keys);
  EXPECT_GT(work.tiers.host_keys, 0);
}

/// Keys and values of few bits in host memory, of which the GPU has its part in bf16: how far the logits are
/// from those of float32, and that both ways into the cache (a prefill, a saved text) mean the same.
void expect_to_cost_at_most(DType few_bits, float most) {
  std::vector<float> logits[2];
  for (const DType type : {DType::f32, few_bits}) {
    Context context = split_context(type, KvTier::host, 2048);
    const MethodId method = context.attach(parse_spec("retrieval:k=40,beam=64,sink=16,window=64"));
    const std::vector<TokenId> text = story(900);
    context.prefill(std::span(text).first(600));
    context.prefill(std::span(text).subspan(600));
    context.build_indexes();
    EXPECT_TRUE(context.impl().gpu->keys_on_host());
    std::vector<float>& all = logits[type == few_bits];
    all = context.forward(story(37), method);
    for (const TokenId token : story(5)) {
      const auto row = context.forward({&token, 1}, method);
      all.insert(all.end(), row.begin(), row.end());
    }
    context.roll_back(900);
    const auto again = context.forward(story(37), method);
    EXPECT_EQ(again, std::vector<float>(all.begin(), all.begin() + std::ssize(again)));
  }
  const float difference = relative_difference(logits[1], logits[0]);
  testing::Test::RecordProperty("relative_difference", std::to_string(difference));
  EXPECT_LT(difference, most);
  EXPECT_GT(difference, 0.0f);
}
TEST(Tier, KeysInEightBitsCostLittle) {
  NEEDS_GPU();
  expect_to_cost_at_most(DType::q8, 0.05f);
}
TEST(Tier, KeysInFourBitsCostMore) {
  NEEDS_GPU();
  expect_to_cost_at_most(DType::q4, 0.3f);
}

/// The same text, read on either device: a GPU computes with other sums, and what is stored of them is 4 bits.
TEST(Tier, FourBitsOfAGpusPrefillAreThoseOfTheCpus) {
  NEEDS_GPU();
  Context gpu = split_context(DType::q4, KvTier::host, 2048);
  Context cpu(pocket(), {.kv_type = DType::q4, .max_tokens = 2048});
  const std::vector<TokenId> text = story(700);
  gpu.prefill(text);
  cpu.prefill(text);
  const std::vector<float> there = gpu.forward(story(20), kDense), here = cpu.forward(story(20), kDense);
  EXPECT_LT(relative_difference(there, here), 0.3f);
}

TEST(Tier, FewBitsAreRefusedOnTheGpuAlone) {
  NEEDS_GPU();
  for (const DType type : {DType::q8, DType::q4}) {
    EXPECT_THROW(split_context(type, KvTier::gpu, 2048), InputError);
    EXPECT_TRUE(split_context(type, KvTier::automatic, 2048).impl().gpu->keys_on_host());
  }
}

TEST(Tier, MemoryThatKeysAndValuesDoNotFitIntoSendsThemToTheHost) {
  NEEDS_GPU();
  const std::int64_t tokens = 60000;
  const KvShape shape = {pocket()->config().layers, pocket()->config().kv_heads, pocket()->config().head_dim,
                         DType::f16, tokens};
  const std::int64_t whole = tokens * shape.token_bytes();
  std::int64_t working = 0;  // weights and what a context takes before it holds keys
  {
    Context context = split_context(DType::f16, KvTier::gpu, tokens);
    working = context.impl().gpu->bytes() + pocket()->impl().gpu_model(0)->bytes();
  }
  const std::int64_t limit = working + whole - 1;
  Context context(pocket(), {.device = Device::cuda, .gpu_memory = limit, .max_tokens = tokens});
  EXPECT_TRUE(context.impl().gpu->keys_on_host()) << context.placement();
  const MethodId method = context.attach(parse_spec("topk:k=40,window=64"));
  context.prefill(story(700));
  context.forward(story(5), method);
  EXPECT_LE(context.impl().gpu->bytes() + pocket()->impl().gpu_model(0)->bytes(), limit);
  EXPECT_NE(context.placement().find("in host memory"), std::string::npos);
}

constexpr std::int64_t kActiveMemory = std::int64_t{16} << 20;

Context active_context(std::int64_t memory, DType type = DType::f32) {
  return Context(pocket(), {.kv_type = type,
                            .device = Device::cuda,
                            .kv_tier = KvTier::host,
                            .active_memory = memory,
                            .max_tokens = 2048});
}

/// A method that finds all far keys but one, so that whatever of them is active the sum is the same: a key
/// that were attended twice, or nowhere, would be seen. Stretches of tokens, single ones and rollbacks.
TEST(ActiveTier, EveryFoundKeyIsAttendedOnce) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const std::int64_t memory : {std::int64_t{0}, kActiveMemory}) {
    Context context = active_context(memory);
    const MethodId method = context.attach(parse_spec("topk:k=99.9%,sink=4,window=64"));
    context.prefill(story(900));
    context.build_indexes();
    const int at = memory > 0;
    logits[at] = context.forward(story(70), method, &work[at]);
    for (const TokenId token : story(5)) {
      WorkReport more;
      const auto row = context.forward({&token, 1}, method, &more);
      logits[at].insert(logits[at].end(), row.begin(), row.end());
      work[at] += more;
    }
    const auto dense = context.forward(story(6), kDense);
    logits[at].insert(logits[at].end(), dense.begin(), dense.end());
    context.roll_back(960);
    const auto later = context.forward(story(20), method);
    logits[at].insert(logits[at].end(), later.begin(), later.end());
    context.roll_back(900);
    const auto again = context.forward(story(70), method);
    EXPECT_EQ(again, std::vector<float>(logits[at].begin(), logits[at].begin() + std::ssize(again)));
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 1e-4f);
  EXPECT_EQ(work[0].tiers.active_keys, 0);
  EXPECT_GT(work[1].tiers.active_keys, 0);
  EXPECT_GT(work[1].tiers.active_bytes, 0);
  const ModelConfig& m = pocket()->config();
  EXPECT_LE(work[1].tiers.active_hits, work[1].tiers.active_keys * m.query_heads / m.kv_heads)
      << "each head of a group finds a key at most once";
  EXPECT_EQ(work[1].tiers.host_keys + work[1].tiers.active_keys, work[1].far_keys);
  EXPECT_EQ(work[1].far_keys, work[0].far_keys) << "heads find all of them, in whatever parts";
  EXPECT_EQ(work[0].tiers.host_keys - work[1].tiers.host_keys, work[1].tiers.active_hits);
}

/// Fifty tokens at once against one by one after a rollback: how far their logits are apart.
float difference_of_chunks(std::int64_t memory, DType type, const char* spec) {
  Context context = active_context(memory, type);
  const MethodId method = context.attach(parse_spec(spec));
  context.prefill(story(900));
  context.build_indexes();
  WorkReport whole, pieces;
  const auto together = context.forward(story(50), method, &whole);
  EXPECT_EQ(whole.tiers.active_hits > 0, memory > 0) << spec;
  context.roll_back(900);
  std::vector<float> apart;
  for (const TokenId token : story(50)) {
    WorkReport one;
    const auto row = context.forward({&token, 1}, method, &one);
    apart.insert(apart.end(), row.begin(), row.end());
    pieces += one;
  }
  EXPECT_NEAR(static_cast<double>(pieces.tiers.active_keys), static_cast<double>(whole.tiers.active_keys),
              0.02 * static_cast<double>(whole.tiers.active_keys))
      << spec;
  return relative_difference(apart, together);
}

/// What is active changes at certain positions, however a text comes in chunks, and begins anew after a
/// rollback. Where all far keys but one are found, nothing hangs on near ties. A GPU multiplies few and many
/// rows by different products, which round differently, so few keys of 8 bits are compared with what that
/// alone makes of them.
TEST(ActiveTier, ChunksDoNotMatter) {
  NEEDS_GPU();
  EXPECT_LT(difference_of_chunks(kActiveMemory, DType::f32, "topk:k=99.9%,sink=4,window=64"), 1e-4f);
  for (const char* spec : {"retrieval:k=40,beam=32,sink=16,window=64", "topk:k=40,sink=4,window=64"}) {
    const float rounding = difference_of_chunks(0, DType::q8, spec);
    EXPECT_LT(difference_of_chunks(kActiveMemory, DType::q8, spec), 2.0f * rounding + 2e-3f) << spec;
  }
}

TEST(ActiveTier, MemoryIsAsPredicted) {
  NEEDS_GPU();
  std::int64_t bytes[2];
  for (const std::int64_t memory : {std::int64_t{0}, kActiveMemory}) {
    Context context = active_context(memory);
    const MethodId method = context.attach(parse_spec("topk:k=40,sink=4,window=64"));
    context.prefill(story(900));
    context.build_indexes();
    context.forward(story(40), method);
    bytes[memory > 0] = context.impl().gpu->bytes();
  }
  EXPECT_GT(bytes[1], bytes[0] + kActiveMemory / 2);
  EXPECT_LT(bytes[1], bytes[0] + kActiveMemory + (std::int64_t{1} << 20)) << "with what keys go up through";
  EXPECT_THROW(active_context(1000), InputError);
}

TEST(ActiveTier, IsRefusedOrSaidWhereKeysLieOnTheGpu) {
  NEEDS_GPU();
  ContextOptions options = {
      .device = Device::cuda, .kv_tier = KvTier::gpu, .active_memory = kActiveMemory, .max_tokens = 2048};
  EXPECT_THROW(Context(pocket(), options), InputError);
  options.kv_tier = KvTier::automatic;
  EXPECT_NE(Context(pocket(), options).placement().find("--active-memory"), std::string::npos);
  options.active_memory = 0;
  EXPECT_EQ(Context(pocket(), options).placement().find("--active-memory"), std::string::npos);
}

}  // namespace
}  // namespace lode
