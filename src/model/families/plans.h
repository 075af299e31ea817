// SPDX-License-Identifier: Apache-2.0
// What the plans of families are read with, and the plans that do not stand in family.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "model/config.h"
#include "model/family.h"

namespace lode {

inline constexpr std::int64_t kMaxWindow = std::int64_t{1} << 30;
inline constexpr double kHuge = 1e15;

/// The experts' matrices as most families call them: all of a layer in one tensor, or one tensor each.
inline constexpr std::array<TensorName, 5> kUsualExperts = {{
    {Place::expert_gate_up, "model.layers.{}.mlp.experts.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight"},
    {Place::expert_gate, "model.layers.{}.mlp.experts.{}.gate_proj.weight", "blk.{}.ffn_gate_exps.weight"},
    {Place::expert_up, "model.layers.{}.mlp.experts.{}.up_proj.weight", "blk.{}.ffn_up_exps.weight"},
    {Place::expert_down, "model.layers.{}.mlp.experts.down_proj", ""},
    {Place::expert_down, "model.layers.{}.mlp.experts.{}.down_proj.weight", "blk.{}.ffn_down_exps.weight"},
}};

/// A family's own names and those that it shares with others, in this order.
template <std::size_t kOwn, std::size_t kShared>
constexpr std::array<TensorName, kOwn + kShared> joined(const std::array<TensorName, kOwn>& own,
                                                        const std::array<TensorName, kShared>& shared) {
  std::array<TensorName, kOwn + kShared> all = {};
  std::copy(shared.begin(), shared.end(), std::copy(own.begin(), own.end(), all.begin()));
  return all;
}

/// DeepSeek's names, which GLM has too: experts with a bias for their choice beside one that all tokens go through, and
/// dense layers.
inline constexpr auto kSharedExperts = joined(
    std::array<TensorName, 8>{{
        {Place::router, "model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"},
        {Place::choice_bias, "model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias"},
        {Place::gate, "model.layers.{}.mlp.shared_experts.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight"},
        {Place::up, "model.layers.{}.mlp.shared_experts.up_proj.weight", "blk.{}.ffn_up_shexp.weight"},
        {Place::down, "model.layers.{}.mlp.shared_experts.down_proj.weight", "blk.{}.ffn_down_shexp.weight"},
        {Place::gate, "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"},
        {Place::up, "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"},
        {Place::down, "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"},
    }},
    kUsualExperts);

// A value of config.json, or `otherwise` where there is none.
bool flag(const Json& json, const char* key, bool otherwise, std::string_view where);
double number(const Json& json, const char* key, double otherwise, std::string_view where, double low,
              double high);
std::int64_t whole(const Json& json, const char* key, std::int64_t otherwise, std::string_view where,
                   std::int64_t low, std::int64_t high);

ActivationKind activation_of(const Json& json, const char* key, std::string_view usual,
                             std::string_view where);
/// attention_bias and mlp_bias.
void all_biases(const Json& json, ModelConfig& c, std::string_view where);
/// The plan's layers, as many as the config has.
std::vector<LayerPlan>& layers_of(ModelConfig& c);

/// Of each layer whether `layer_types` calls it `name` and not full_attention, or what the family's rule says where
/// there is no such list.
std::vector<bool> layers_called(const Json& json, const ModelConfig& c, std::string_view name,
                                std::string_view where, const std::function<bool(int)>& rule);
inline std::vector<bool> windowed_layers(const Json& json, const ModelConfig& c, std::string_view where,
                                         const std::function<bool(int)>& rule) {
  return layers_called(json, c, "sliding_attention", where, rule);
}
void set_windows(const Json& json, ModelConfig& c, const std::vector<bool>& windowed, std::string_view where);
void refuse_window(const Json& json, std::string_view where);
/// Windows from layer max_window_layers on, where they are switched on.
void qwen_windows(const Json& json, ModelConfig& c, std::string_view where);

// Mixtures of experts (families/experts.cc).
void plan_mixtral(const Json& json, ModelConfig& c, std::string_view where);
void plan_qwen3_moe(const Json& json, ModelConfig& c, std::string_view where);
void plan_gpt_oss(const Json& json, ModelConfig& c, std::string_view where);
void plan_glm_moe(const Json& json, ModelConfig& c, std::string_view where);
/// How many experts there are, how many a token goes through, and how wide they are.
void read_experts(const Json& json, ModelConfig& c, const char* count, std::string_view where);
/// Which layers have experts in place of the feed-forward that all tokens go through: those of mlp_only_layers, and
/// those that are no multiple of decoder_sparse_step, have none. `shared` is the width of an expert that all tokens
/// go through beside the others.
void set_expert_layers(const Json& json, ModelConfig& c, std::int64_t shared, std::string_view where);
/// What a configuration of such a mixture means where it says nothing.
struct SharedExpertsUsual {
  const char* score;          ///< softmax or sigmoid
  std::int64_t dense_layers;  ///< in front of those with experts
};
/// Experts beside one that all tokens go through, perhaps in groups, behind some dense layers.
void read_shared_experts(const Json& json, ModelConfig& c, const SharedExpertsUsual& usual,
                         std::string_view where);

// Hybrids of recurrent layers and attention (families/hybrid.cc).
void plan_qwen_hybrid(const Json& json, ModelConfig& c, std::string_view where);
extern const std::span<const TensorName> kQwenHybridNames;

// Attention over latent rows (families/latent.cc).
void plan_deepseek_v2(const Json& json, ModelConfig& c, std::string_view where);
void plan_deepseek_v3(const Json& json, ModelConfig& c, std::string_view where);
void plan_glm_lite(const Json& json, ModelConfig& c, std::string_view where);
extern const std::span<const TensorName> kDeepseekNames;

// Gemma 4 (families/gemma4.cc).
void plan_gemma4(const Json& json, ModelConfig& c, std::string_view where);
extern const std::span<const TensorName> kGemma4Names;

extern const std::span<const TensorName> kMixtralNames, kQwenMoeNames, kGptOssNames, kGlmMoeNames;

}  // namespace lode
