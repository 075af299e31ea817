// SPDX-License-Identifier: Apache-2.0
// Every family against transformers (Gemma 4: against a float64 calculation), from a folder and from a GGUF file
// (tests/golden/make_family_goldens.py, make_gemma4_goldens.py); and every family under a method that selects everything, which is full attention to the bit.
#include "model/family.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/threads.h"
#include "io/safetensors.h"
#include "model/kv_shape.h"
#include "model/llama.h"
#include "model/source.h"
#include "support/compare.h"
#include "support/everything.h"
#include "support/family_golden.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::expect_refused;

class FamilyGolden : public testing::TestWithParam<std::string> {
 protected:
  /// Logits [T, V] of all tokens, read in chunks of `chunk`.
  static std::vector<float> logits_of(const FamilyModel& model, std::span<const TokenId> ids,
                                      std::size_t chunk, Phase phase = Phase::context,
                                      std::span<Selector* const> selectors = {},
                                      const ForwardHooks* hooks = nullptr) {
    ThreadPool pool(2);
    Llama llama(model.config, model.weights, pool);
    const auto tokens = std::ssize(ids);
    KvStore kv(kv_shape(model.config, DType::f32, tokens));
    const Rope rope(model.config, tokens);
    std::vector<float> all, logits;
    for (std::size_t at = 0; at < ids.size(); at += chunk) {
      const SequenceTokens part = {ids.subspan(at, std::min(chunk, ids.size() - at)), &kv, 0};
      llama.forward(
          {.sequences = {&part, 1}, .phase = phase, .selectors = selectors, .dense = kDense, .hooks = hooks},
          rope, LogitRows::all, logits);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  static void expect_golden(const std::filesystem::path& path, const FamilyTokens& golden) {
    const FamilyModel model(path);
    ForwardHooks hooks;
    hooks.layer_done = [&](int layer, std::span<const float> x) {
      if (layer + 1 == model.config.layers) return;  // transformers gives the last one after the final norm
      const auto want =
          std::span(golden.hidden).subspan(static_cast<std::size_t>(layer + 1) * x.size(), x.size());
      EXPECT_LT(relative_difference(x, want), 2e-4f) << "layer " << layer;
    };
    const auto whole = logits_of(model, golden.ids, golden.ids.size(), Phase::context, {}, &hooks);
    EXPECT_LT(relative_difference(whole, golden.logits), 2e-4f);
    EXPECT_LT(relative_difference(logits_of(model, golden.ids, 7), golden.logits), 2e-4f);
    EXPECT_LT(relative_difference(logits_of(model, golden.ids, 1, Phase::generation), golden.logits), 2e-4f);
    const auto largest = [&](const std::vector<float>& logits) {
      std::vector<std::ptrdiff_t> ids;
      const auto v = static_cast<std::ptrdiff_t>(model.config.vocab);
      for (auto row = logits.begin(); row != logits.end(); row += v)
        ids.push_back(std::max_element(row, row + v) - row);
      return ids;
    };
    EXPECT_EQ(largest(whole), largest(golden.logits));
  }

  static constexpr LocalWindow kDense = {.sink = 1, .window = 4};
};

TEST_P(FamilyGolden, FolderEqualsTransformers) {
  expect_golden(kFamilies / GetParam(), FamilyTokens(GetParam()));
}

TEST_P(FamilyGolden, GgufEqualsTransformers) {
  const auto path = kFamilies / GetParam() / "model.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "GGUF has no such form of this family";
  expect_golden(path, FamilyTokens(GetParam()));
}

TEST_P(FamilyGolden, OtherFormsOfGgufFilesEqualTransformers) {
  const auto path = kFamilies / GetParam() / "other.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "converters write this family in one form";
  expect_golden(path, FamilyTokens(GetParam()));
}

TEST_P(FamilyGolden, SelectingEverythingIsFullAttention) {
  const FamilyTokens golden(GetParam());
  const FamilyModel model(kFamilies / GetParam());
  std::vector<Everything> selectors;
  std::vector<Selector*> pointers;
  ThreadPool pool(1);
  for (int i = 0; i < model.config.layers; ++i)
    selectors.emplace_back(LayerGeometry{.layer = i,
                                         .query_heads = model.config.query_heads,
                                         .kv_heads = model.config.kv_heads_of(i),
                                         .head_dim = model.config.head_dim_of(i),
                                         .dense = kDense,
                                         .pool = &pool});
  for (Everything& selector : selectors) pointers.push_back(&selector);
  for (const std::size_t chunk : {std::size_t{1}, std::size_t{9}})
    EXPECT_EQ(logits_of(model, golden.ids, chunk, Phase::generation, pointers),
              logits_of(model, golden.ids, chunk, Phase::generation));
  for (int i = 0; i < model.config.layers; ++i) {
    SCOPED_TRACE(i);
    // Nothing is far in a window, and a recurrent layer has no keys.
    EXPECT_EQ(selectors[static_cast<std::size_t>(i)].calls > 0, model.config.plan.layer(i).chooses());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FamilyGolden,
                         testing::Values("llama", "mistral-window", "ministral3", "qwen2", "qwen2-window",
                                         "qwen3", "gemma3", "phi3", "phi3-longrope", "smollm3", "granite",
                                         "mixtral", "qwen3-moe", "qwen3-moe-mixed", "gpt-oss",
                                         "gpt-oss-mxfp4", "qwen3-next", "qwen35", "qwen35-moe", "deepseek-v2",
                                         "deepseek-v3", "gemma3-seeing", "gemma4", "gemma4-moe", "glm4-lite",
                                         "glm4-moe", "qwen3-vl", "glm4", "glm"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Families, RandomWeightsAreThoseThatAFileHas) {
  for (const char* name : {"llama", "qwen3", "gpt-oss", "qwen3-moe", "qwen35", "qwen35-moe", "qwen3-next"}) {
    SCOPED_TRACE(name);
    const FamilyModel model(kFamilies / name);
    const ModelWeights random = ModelWeights::random(model.config, DType::f32, 1);
    for (std::size_t i = 0; i < random.layers.size(); ++i) {
      const LayerWeights &made = random.layers[i], &read = model.weights.layers[i];
      for (const auto member : {&LayerWeights::q, &LayerWeights::k, &LayerWeights::v, &LayerWeights::o,
                                &LayerWeights::q_norm, &LayerWeights::attention_gate, &LayerWeights::gate,
                                &LayerWeights::router, &LayerWeights::shared_gate, &LayerWeights::sinks}) {
        EXPECT_EQ((made.*member).rows, (read.*member).rows);
        EXPECT_EQ((made.*member).cols, (read.*member).cols);
      }
      for (const auto member :
           {&DeltaWeights::qkv, &DeltaWeights::z, &DeltaWeights::b, &DeltaWeights::a, &DeltaWeights::conv,
            &DeltaWeights::dt_bias, &DeltaWeights::decay, &DeltaWeights::norm, &DeltaWeights::out}) {
        EXPECT_EQ((made.delta.*member).rows, (read.delta.*member).rows);
        EXPECT_EQ((made.delta.*member).cols, (read.delta.*member).cols);
      }
    }
  }
}

TEST(Families, PlansSayWhatIsNotLlama) {
  const auto plan = [](const char* name) { return read_config(kFamilies / name).plan; };
  EXPECT_EQ(plan("mistral-window").layer(1).window, 8);
  EXPECT_EQ(plan("qwen2-window").layer(0).window, 0);
  EXPECT_EQ(plan("qwen2-window").layer(1).window, 8);
  EXPECT_TRUE(plan("qwen2").q_bias && !plan("qwen2").o_bias);
  EXPECT_TRUE(plan("qwen3").qk_norm);
  EXPECT_EQ(plan("gemma3").layer(0).turn, Turn::local);
  EXPECT_EQ(plan("gemma3").layer(5).turn, Turn::usual);
  EXPECT_EQ(plan("gemma3").layer(5).window, 0);
  EXPECT_EQ(plan("smollm3").layer(3).turn, Turn::none);
  EXPECT_EQ(plan("phi3-longrope").rotary_dim, 4);
  EXPECT_EQ(plan("granite").residual_multiplier, 0.7);
  EXPECT_TRUE(plan("mixtral").experts.normalise);
  EXPECT_FALSE(plan("qwen3-moe-mixed").layer(1).experts);
  EXPECT_TRUE(plan("gpt-oss").sinks);
  EXPECT_EQ(plan("gpt-oss").layer(0).window, 8);
  EXPECT_EQ(plan("gpt-oss").layer(1).window, 0);
  EXPECT_TRUE(plan("qwen35").layer(0).recurrent && !plan("qwen35").layer(3).recurrent);
  EXPECT_EQ(plan("qwen35-moe").layer(0).width, 20);
  EXPECT_EQ(plan("deepseek-v3").latent.row(), 20);
  EXPECT_EQ(plan("deepseek-v3").experts.group_best, 2);
  EXPECT_EQ(plan("glm4").rotary_dim, 6);
  EXPECT_TRUE(plan("glm4").post_norms && !plan("glm").post_norms && plan("glm").v_bias);
  const ModelConfig gemma4 = read_config(kFamilies / "gemma4");
  EXPECT_EQ(gemma4.head_dim_of(1), 8);
  EXPECT_EQ(gemma4.head_dim_of(2), 16);
  EXPECT_TRUE(gemma4.plan.layer(3).own_rows());
  EXPECT_EQ(gemma4.plan.layer(4).rows_of, 2) << "the last of its kind before the layers that share";
  EXPECT_EQ(gemma4.plan.layer(5).rows_of, 3);
  EXPECT_EQ(gemma4.plan.layer(6).width, 64);
  const ModelConfig large = read_config(kFamilies / "gemma4-moe");
  EXPECT_EQ(large.kv_heads_of(0), 2);
  EXPECT_EQ(large.kv_heads_of(1), 1);
  EXPECT_TRUE(large.plan.layer(1).value_is_key && !large.plan.layer(0).value_is_key);
}

TEST(Families, KeysOfSharedLayersAreKeptOnce) {
  const KvShape shape = kv_shape(read_config(kFamilies / "gemma4"), DType::f16, 10);
  EXPECT_EQ(shape.token_bytes(), 2 * 2 * 2 * (3 * 8 + 16)) << "three layers of heads of 8, one of 16";
  EXPECT_FALSE(shape.has_rows(6));
  EXPECT_TRUE(shape.layers_share_rows());
  const KvShape large = kv_shape(read_config(kFamilies / "gemma4-moe"), DType::f16, 10);
  EXPECT_EQ(large.token_bytes(), 2 * 2 * (2 * 2 * 8 + 2 * 16));
  EXPECT_TRUE(kv_shape(read_config(kFamilies / "llama"), DType::f16, 10).by_layer.empty());
}

TEST(Families, EachNamesEveryTensorOnce) {
  for (const Family& family : families()) {
    std::vector<std::string> folder, gguf;  // names of tensors: no two places have the same
    for (const TensorName& name : tensor_names(family)) {
      EXPECT_FALSE(name.folder.empty() && name.gguf.empty()) << family.name;
      if (!name.folder.empty())
        folder.push_back(fmt::format("{} {}", name.folder, static_cast<int>(name.form)));
      if (!name.gguf.empty()) gguf.push_back(std::string(name.gguf));
    }
    for (auto* names : {&folder, &gguf}) {
      std::sort(names->begin(), names->end());
      EXPECT_TRUE(std::adjacent_find(names->begin(), names->end()) == names->end()) << family.name;
    }
    EXPECT_EQ(find_family(family.architecture), &family);
  }
  EXPECT_EQ(find_family("GPT2LMHeadModel"), nullptr);
}

/// A copy of a family's folder with one value of its config changed.
ModelConfig changed(const char* name, const char* key, Json value) {
  const auto path = kFamilies / name / "config.json";
  Json json = parse_json(read_file(path), path.string());
  json[key] = std::move(value);
  return config_of(json, "config.json");
}

TEST(Families, WrongValuesAreNamed) {
  expect_refused("layer_types", [] { changed("gemma3", "layer_types", {"full_attention"}); });
  expect_refused("layer_types", [] {
    changed("gemma3", "layer_types", Json(std::vector<std::string>(7, "linear_attention")));
  });
  expect_refused("sliding_window", [] { changed("gemma3", "sliding_window", 0); });
  expect_refused("sliding_window", [] { changed("mistral-window", "sliding_window", "8"); });
  expect_refused("query_pre_attn_scalar", [] { changed("gemma3", "query_pre_attn_scalar", 0); });
  expect_refused("attn_logit_softcapping", [] { changed("gemma3", "attn_logit_softcapping", 50.0); });
  expect_refused("no_rope_layers", [] { changed("smollm3", "no_rope_layers", {1, 0}); });
  expect_refused("no_rope_layers", [] { changed("smollm3", "no_rope_layers", {1, 0, 2, 1}); });
  expect_refused("hidden_act", [] { changed("qwen2", "hidden_act", "relu"); });
  expect_refused("residual_multiplier", [] { changed("granite", "residual_multiplier", -1); });
  expect_refused("short_factor", [] {
    changed("phi3-longrope", "rope_parameters",
            {{"rope_type", "longrope"},
             {"original_max_position_embeddings", 16},
             {"short_factor", {1.0}},
             {"long_factor", {1.0, 1.0}},
             {"partial_rotary_factor", 0.5}});
  });
  expect_refused("partial_rotary_factor", [] { changed("phi3", "partial_rotary_factor", 0.1); });
  expect_refused("partial_rotary_factor", [] { changed("qwen3", "partial_rotary_factor", 0.5); });
  expect_refused("num_experts_per_tok", [] { changed("mixtral", "num_experts_per_tok", 5); });
  expect_refused("num_local_experts", [] { changed("mixtral", "num_local_experts", 0); });
  expect_refused("mlp_only_layers", [] { changed("qwen3-moe-mixed", "mlp_only_layers", {3}); });
  expect_refused("swiglu_alpha", [] { changed("gpt-oss", "swiglu_alpha", 1.0); });
  expect_refused("layer_types",
                 [] { changed("qwen35", "layer_types", Json(std::vector<std::string>(4, "mamba"))); });
  expect_refused("linear_num_value_heads", [] { changed("qwen35", "linear_num_value_heads", 3); });
  expect_refused("linear_conv_kernel_dim", [] { changed("qwen35", "linear_conv_kernel_dim", 0); });
  expect_refused("sliding_window", [] { changed("glm4", "sliding_window", 8); });
  expect_refused("partial_rotary_factor", [] {
    changed("glm4", "rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.1}});
  });
  EXPECT_EQ(changed("glm4", "rope_parameters", {{"rope_type", "default"}}).plan.rotary_dim, 6) << "half";
  EXPECT_FALSE(changed("glm4", "attention_bias", false).plan.q_bias);
  expect_refused("kv_lora_rank", [] { changed("deepseek-v2", "kv_lora_rank", 511); });
  expect_refused("n_group", [] { changed("deepseek-v3", "n_group", 3); });
  expect_refused("num_kv_shared_layers", [] { changed("gemma4", "num_kv_shared_layers", 6); });
  expect_refused("num_kv_shared_layers", [] { changed("gemma4", "num_kv_shared_layers", 7); });
  expect_refused("per_layer_config", [] {
    changed("gemma4", "per_layer_config", {{"2", {{"head_dim", 16}}}});
  });
  expect_refused("use_bidirectional_attention",
                 [] { changed("gemma4", "use_bidirectional_attention", "all"); });
  expect_refused("head_dim", [] { changed("gemma4", "head_dim", 7); });
  expect_refused("num_global_key_value_heads",
                 [] { changed("gemma4-moe", "num_global_key_value_heads", 3); });
  expect_refused("num_experts_per_tok", [] { changed("gemma4-moe", "top_k_experts", 7); });
  expect_refused("scoring_func", [] { changed("deepseek-v3", "scoring_func", "relu"); });
}

}  // namespace
}  // namespace lode
