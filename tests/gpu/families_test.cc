// SPDX-License-Identifier: Apache-2.0
// Every family on the GPU against transformers, from a folder and from a GGUF file: whole, in chunks and token
// by token, keys and values on the GPU and in host memory; and under a method that the host chooses for.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/threads.h"
#include "lodestone/error.h"
#include "model/kv_shape.h"
#include "support/compare.h"
#include "support/everything.h"
#include "support/family_golden.h"
#include "support/gpu.h"

namespace lode {
namespace {

class GpuFamily : public testing::TestWithParam<std::string> {
 protected:
  struct Kind {
    DType type = DType::f32;
    KvTier tier = KvTier::gpu;
    std::size_t chunk = 1;
  };
  static constexpr LocalWindow kNear = {.sink = 1, .window = 4};

  static std::vector<float> logits_of(const FamilyModel& model, std::span<const TokenId> ids,
                                      const Kind& kind, std::span<Selector* const> selectors = {}) {
    const auto tokens = std::ssize(ids);
    ThreadPool pool(2);
    KvStore kv(kv_shape(model.config, kind.type, tokens));
    const auto weights = make_gpu_model(model.config, model.weights, 0);
    const auto gpu = make_gpu_context(
        model.config, weights,
        {.pool = &pool, .kv_type = kind.type, .max_tokens = tokens, .chunk = tokens, .tier = kind.tier});
    const Rope rope(model.config, tokens);
    std::vector<float> all, logits;
    for (std::size_t at = 0; at < ids.size(); at += kind.chunk) {
      const SequenceTokens part = {ids.subspan(at, std::min(kind.chunk, ids.size() - at)), &kv, 0};
      gpu->forward({.sequences = {&part, 1},
                    .phase = selectors.empty() ? Phase::context : Phase::generation,
                    .selectors = selectors,
                    .dense = kNear},
                   rope, LogitRows::all, logits);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  /// Of keys and values that are rounded. Where scores of experts are near, rounding sends a token through others, and
  /// those behind it read other keys: of a mixture only every second token must be near, each for itself.
  static void expect_near_golden(const FamilyModel& model, const std::vector<float>& found,
                                 const FamilyTokens& golden) {
    if (model.config.plan.experts.count == 0) {
      EXPECT_LT(relative_difference(found, golden.logits), 8e-2f);
      return;
    }
    const std::ptrdiff_t vocab = model.config.vocab, tokens = std::ssize(golden.ids);
    const auto row = [&](const std::vector<float>& logits, std::ptrdiff_t t) {
      return std::vector<float>(logits.begin() + t * vocab, logits.begin() + (t + 1) * vocab);
    };
    std::ptrdiff_t near = 0;
    for (std::ptrdiff_t t = 0; t < tokens; ++t)
      near += relative_difference(row(found, t), row(golden.logits, t)) < 8e-2f ? 1 : 0;
    EXPECT_GE(near, tokens / 2);
  }

  static void expect_golden(const std::filesystem::path& path) {
    const FamilyTokens golden(GetParam());
    const FamilyModel model(path);
    const bool refuses_host = !model.config.plan.recurrent_floats().empty() ||
                              !kv_shape(model.config, DType::f32, 1).by_layer.empty();
    for (const KvTier tier : {KvTier::gpu, KvTier::host}) {
      if (refuses_host && tier == KvTier::host) {
        EXPECT_THROW(logits_of(model, golden.ids, {.tier = tier}), InputError);
        continue;
      }
      for (const std::size_t chunk : {golden.ids.size(), std::size_t{11}, std::size_t{3}, std::size_t{1}}) {
        SCOPED_TRACE(testing::Message() << "chunk " << chunk << (tier == KvTier::gpu ? "" : ", on the host"));
        const auto found = logits_of(model, golden.ids, {.tier = tier, .chunk = chunk});
        EXPECT_LT(relative_difference(found, golden.logits), 2e-4f);
      }
    }
    for (const std::size_t chunk : {golden.ids.size(), std::size_t{1}}) {
      SCOPED_TRACE(testing::Message() << "bf16 keys and values, chunk " << chunk);
      expect_near_golden(model, logits_of(model, golden.ids, {.type = DType::bf16, .chunk = chunk}), golden);
    }
  }
};

TEST_P(GpuFamily, FolderEqualsTransformers) {
  NEEDS_GPU();
  expect_golden(kFamilies / GetParam());
}

TEST_P(GpuFamily, GgufEqualsTransformers) {
  NEEDS_GPU();
  const auto path = kFamilies / GetParam() / "model.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "GGUF has no such form of this family";
  expect_golden(path);
}

TEST_P(GpuFamily, SelectingEverythingIsFullAttention) {
  NEEDS_GPU();
  const FamilyTokens golden(GetParam());
  const FamilyModel model(kFamilies / GetParam());
  ThreadPool pool(1);
  std::vector<Everything> selectors;
  std::vector<Selector*> pointers;
  for (int i = 0; i < model.config.layers; ++i)
    selectors.emplace_back(LayerGeometry{.layer = i,
                                         .query_heads = model.config.query_heads,
                                         .kv_heads = model.config.kv_heads,
                                         .head_dim = model.config.head_dim,
                                         .dense = kNear,
                                         .pool = &pool});
  for (Everything& selector : selectors) pointers.push_back(&selector);
  EXPECT_LT(relative_difference(logits_of(model, golden.ids, {}, pointers), golden.logits), 2e-4f);
  for (int i = 0; i < model.config.layers; ++i)
    EXPECT_EQ(selectors[static_cast<std::size_t>(i)].calls == 0, !model.config.plan.layer(i).chooses()) << i;
}

INSTANTIATE_TEST_SUITE_P(Models, GpuFamily,
                         testing::Values("llama", "mistral-window", "ministral3", "qwen2", "qwen2-window",
                                         "qwen3", "gemma3", "phi3", "phi3-longrope", "smollm3", "granite",
                                         "mixtral", "qwen3-moe", "qwen3-moe-mixed", "gpt-oss", "deepseek-v2",
                                         "deepseek-v3", "gpt-oss-mxfp4", "qwen35", "qwen35-moe", "qwen3-next",
                                         "gemma4", "gemma4-moe", "glm4-lite", "glm4-moe", "qwen3-vl", "glm4",
                                         "glm"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lode
