// SPDX-License-Identifier: Apache-2.0
#include "model/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "model/families/plans.h"

namespace lode {

namespace {

void plan_llama(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  all_biases(json, c, where);
  refuse_window(json, where);
}

void plan_mistral(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  all_biases(json, c, where);
  const bool all = json_has(json, "sliding_window");
  set_windows(json, c, windowed_layers(json, c, where, [&](int) { return all; }), where);
}

/// Queries grow with their position, as in Llama 4.
void plan_ministral(const Json& json, ModelConfig& c, std::string_view where) {
  plan_mistral(json, c, where);
  const Json& rope =
      json_member(json, json_has(json, "rope_parameters") ? "rope_parameters" : "rope_scaling");
  c.plan.query_growth = number(rope, "llama_4_scaling_beta", 0.0, where, 0.0, 1e3);
  c.plan.query_growth_start =
      whole(rope, "original_max_position_embeddings", c.max_positions, where, 1, kMaxWindow);
}

void plan_qwen2(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  c.plan.q_bias = c.plan.k_bias = c.plan.v_bias = true;
  qwen_windows(json, c, where);
}

void plan_qwen3(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  ModelPlan& p = c.plan;
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.qk_norm = true;
  qwen_windows(json, c, where);
}

void plan_gemma3(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.activation = activation_of(json, "hidden_activation", "gelu_pytorch_tanh", where);
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.qk_norm = p.post_norms = true;
  p.norm_plus_one = flag(json, "norm_plus_one", true, where);  // GGUF files hold the sum
  p.score_scale = 1 / std::sqrt(number(json, "query_pre_attn_scalar", 256, where, 1e-6, 1e6));
  p.embedding_multiplier = std::sqrt(static_cast<double>(c.hidden));
  p.logit_cap = number(json, "final_logit_softcapping", 0.0, where, 1e-6, kHuge);
  if (json_has(json, "attn_logit_softcapping"))
    throw UnreadableError(
        fmt::format("{}: 'attn_logit_softcapping': expected null, found a number: not supported", where));
  const std::int64_t period = whole(json, "sliding_window_pattern", 6, where, 1, kMaxWindow);
  const auto windowed = windowed_layers(json, c, where, [&](int i) { return (i + 1) % period != 0; });
  set_windows(json, c, windowed, where);
  p.local_theta = number(json, "rope_local_base_freq", 10000.0, where, 2, kHuge);
  const Json& local = json_member(json_member(json, "rope_parameters"), "sliding_attention");
  p.local_theta = number(local, "rope_theta", p.local_theta, where, 2, kHuge);
  for (std::size_t i = 0; i < windowed.size(); ++i) {
    if (windowed[i]) layers_of(c)[i].turn = Turn::local;
  }
}

void plan_phi3(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  const bool all = json_has(json, "sliding_window");
  set_windows(json, c, windowed_layers(json, c, where, [&](int) { return all; }), where);
}

void plan_smollm3(const Json& json, ModelConfig& c, std::string_view where) {
  all_biases(json, c, where);
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  if (flag(json, "use_sliding_window", false, where))
    throw UnreadableError(
        fmt::format("{}: 'use_sliding_window': expected false in this architecture, found true", where));
  const std::int64_t period = whole(json, "no_rope_layer_interval", 4, where, 1, kMaxWindow);
  const bool given = json_has(json, "no_rope_layers");
  if (given && (!json["no_rope_layers"].is_array() || std::ssize(json["no_rope_layers"]) != c.layers))
    throw InputError(fmt::format("{}: 'no_rope_layers': expected a list of {} numbers", where, c.layers));
  for (int i = 0; i < c.layers; ++i) {
    const auto at = static_cast<std::size_t>(i);
    // 1 in the list: the layer has RoPE.
    const bool turns =
        given ? json_int({{"no_rope_layers", json["no_rope_layers"][at]}}, "no_rope_layers", where, 0, 1) == 1
              : (i + 1) % period != 0;
    if (!turns) layers_of(c)[at].turn = Turn::none;
  }
}

void plan_granite(const Json& json, ModelConfig& c, std::string_view where) {
  plan_llama(json, c, where);
  c.plan.embedding_multiplier = number(json, "embedding_multiplier", 1.0, where, 1e-9, kHuge);
  c.plan.residual_multiplier = number(json, "residual_multiplier", 1.0, where, 1e-9, kHuge);
  c.plan.score_scale = number(json, "attention_multiplier", 1.0, where, 1e-9, kHuge);
  c.plan.logit_divisor = number(json, "logits_scaling", 1.0, where, 1e-9, kHuge);
}

/// Half of each head turns where nothing else is said.
void plan_glm(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.activation = activation_of(json, "hidden_act", "silu", where);
  p.q_bias = p.k_bias = p.v_bias = flag(json, "attention_bias", true, where);
  refuse_window(json, where);
  const auto says_share = [](const Json& object) { return json_has(object, "partial_rotary_factor"); };
  if (!says_share(json) && !says_share(json_member(json, "rope_parameters"))) p.rotary_dim = c.head_dim / 2;
}

void plan_glm4(const Json& json, ModelConfig& c, std::string_view where) {
  plan_glm(json, c, where);
  c.plan.post_norms = true;
}

// Some converters, or some who use them, put q, k and v into one matrix.
constexpr std::array<TensorName, 23> kUsualNames = {{
    {Place::embedding, "model.embed_tokens.weight", "token_embd.weight"},
    {Place::final_norm, "model.norm.weight", "output_norm.weight"},
    {Place::output, "lm_head.weight", "output.weight"},
    {Place::attention_norm, "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"},
    {Place::qkv, "", "blk.{}.attn_qkv.weight"},
    {Place::q, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"},
    {Place::k, "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"},
    {Place::v, "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"},
    {Place::qkv_bias, "", "blk.{}.attn_qkv.bias"},
    {Place::q_bias, "model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"},
    {Place::k_bias, "model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"},
    {Place::v_bias, "model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"},
    {Place::q_norm, "model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"},
    {Place::k_norm, "model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"},
    {Place::o, "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"},
    {Place::o_bias, "model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias"},
    {Place::mlp_norm, "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"},
    {Place::gate, "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"},
    {Place::gate_bias, "model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias"},
    {Place::up, "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"},
    {Place::up_bias, "model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias"},
    {Place::down, "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"},
    {Place::down_bias, "model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias"},
}};

constexpr std::array<TensorName, 3> kGemma3Names = {{
    {Place::attention_post_norm, "model.layers.{}.post_attention_layernorm.weight",
     "blk.{}.post_attention_norm.weight"},
    {Place::mlp_norm, "model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight"},
    {Place::mlp_post_norm, "model.layers.{}.post_feedforward_layernorm.weight",
     "blk.{}.post_ffw_norm.weight"},
}};

constexpr std::array<TensorName, 2> kPhi3Names = {{
    {Place::qkv, "model.layers.{}.self_attn.qkv_proj.weight", "blk.{}.attn_qkv.weight"},
    {Place::gate_up, "model.layers.{}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight"},
}};

constexpr std::array<TensorName, 1> kGlmNames = {{
    {Place::gate_up, "model.layers.{}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight"},
}};

constexpr auto kGlm4Names = joined(
    std::array<TensorName, 3>{{
        {Place::attention_post_norm, "model.layers.{}.post_self_attn_layernorm.weight",
         "blk.{}.post_attention_norm.weight"},
        {Place::mlp_norm, "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"},
        {Place::mlp_post_norm, "model.layers.{}.post_mlp_layernorm.weight", "blk.{}.post_ffw_norm.weight"},
    }},
    kGlmNames);

// SmolLM2 is a Llama.
const std::array<Family, 25> kFamilies = {{
    {.name = "Llama",
     .architecture = "LlamaForCausalLM",
     .gguf = "llama",
     .plan = plan_llama,
     .gguf_pairs = true},
    {.name = "Mistral",
     .architecture = "MistralForCausalLM",
     .gguf = "llama",
     .plan = plan_mistral,
     .gguf_pairs = true},
    {.name = "Ministral 3",
     .architecture = "Ministral3ForCausalLM",
     .gguf = "mistral3",
     .plan = plan_ministral,
     .gguf_pairs = true},
    {.name = "Qwen2", .architecture = "Qwen2ForCausalLM", .gguf = "qwen2", .plan = plan_qwen2},
    {.name = "Qwen3", .architecture = "Qwen3ForCausalLM", .gguf = "qwen3", .plan = plan_qwen3},
    {.name = "Gemma 3",
     .architecture = "Gemma3ForCausalLM",
     .gguf = "gemma3",
     .plan = plan_gemma3,
     .own_names = kGemma3Names,
     .tied = true},
    {.name = "Gemma 4",
     .architecture = "Gemma4ForCausalLM",
     .gguf = "gemma4",
     .plan = plan_gemma4,
     .own_names = kGemma4Names,
     .tied = true,
     .experts_too = true},
    {.name = "Phi-3",
     .architecture = "Phi3ForCausalLM",
     .gguf = "phi3",
     .plan = plan_phi3,
     .own_names = kPhi3Names,
     .partial_rope = true},
    {.name = "SmolLM3",
     .architecture = "SmolLM3ForCausalLM",
     .gguf = "smollm3",
     .plan = plan_smollm3,
     .gguf_pairs = true,
     .tied = true},
    {.name = "Granite",
     .architecture = "GraniteForCausalLM",
     .gguf = "granite",
     .plan = plan_granite,
     .gguf_pairs = true},
    {.name = "Mixtral",
     .architecture = "MixtralForCausalLM",
     .gguf = "llama",
     .plan = plan_mixtral,
     .own_names = kMixtralNames,
     .gguf_pairs = true,
     .experts = true},
    {.name = "Qwen3 MoE",
     .architecture = "Qwen3MoeForCausalLM",
     .gguf = "qwen3moe",
     .plan = plan_qwen3_moe,
     .own_names = kQwenMoeNames,
     .experts = true},
    {.name = "gpt-oss",
     .architecture = "GptOssForCausalLM",
     .gguf = "gpt-oss",
     .plan = plan_gpt_oss,
     .own_names = kGptOssNames,
     .experts = true},
    {.name = "Qwen3-Next",
     .architecture = "Qwen3NextForCausalLM",
     .gguf = "qwen3next",
     .plan = plan_qwen_hybrid,
     .own_names = kQwenHybridNames,
     .partial_rope = true,
     .experts = true},
    {.name = "Qwen3.5",
     .architecture = "Qwen3_5ForCausalLM",
     .gguf = "qwen35",
     .plan = plan_qwen_hybrid,
     .own_names = kQwenHybridNames,
     .partial_rope = true,
     .rope_sections = {11, 11, 10}},
    {.name = "Qwen3.5 MoE",
     .architecture = "Qwen3_5MoeForCausalLM",
     .gguf = "qwen35moe",
     .plan = plan_qwen_hybrid,
     .own_names = kQwenHybridNames,
     .partial_rope = true,
     .rope_sections = {11, 11, 10},
     .experts = true},
    {.name = "DeepSeek-V3",
     .architecture = "DeepseekV3ForCausalLM",
     .gguf = "deepseek2",
     .plan = plan_deepseek_v3,
     .own_names = kDeepseekNames,
     .experts = true},
    {.name = "DeepSeek-V2",
     .architecture = "DeepseekV2ForCausalLM",
     .gguf = "deepseek2",
     .plan = plan_deepseek_v2,
     .own_names = kDeepseekNames,
     .experts = true},
    // Models that see, of which files hold the text model alone.
    {.name = "Qwen2.5-VL",
     .architecture = "Qwen2_5_VLForConditionalGeneration",
     .gguf = "qwen2vl",
     .plan = plan_qwen2,
     .rope_sections = {16, 24, 24}},
    {.name = "Qwen3-VL",
     .architecture = "Qwen3VLForConditionalGeneration",
     .gguf = "qwen3vl",
     .plan = plan_qwen3,
     .rope_sections = {24, 20, 20}},
    {.name = "Qwen3-VL MoE",
     .architecture = "Qwen3VLMoeForConditionalGeneration",
     .gguf = "qwen3vlmoe",
     .plan = plan_qwen3_moe,
     .own_names = kQwenMoeNames,
     .rope_sections = {24, 20, 20},
     .experts = true},
    {.name = "GLM-4.7 Flash",
     .architecture = "Glm4MoeLiteForCausalLM",
     .gguf = "deepseek2",
     .plan = plan_glm_lite,
     .own_names = kDeepseekNames,
     .experts = true},
    {.name = "GLM-4 MoE",
     .architecture = "Glm4MoeForCausalLM",
     .gguf = "glm4moe",
     .plan = plan_glm_moe,
     .own_names = kGlmMoeNames,
     .partial_rope = true,
     .experts = true},
    {.name = "GLM-4",
     .architecture = "Glm4ForCausalLM",
     .gguf = "glm4",
     .plan = plan_glm4,
     .own_names = kGlm4Names,
     .gguf_pairs = true,
     .folder_pairs = true,
     .partial_rope = true},
    {.name = "GLM-4 of 2024",
     .architecture = "GlmForCausalLM",
     .gguf = "chatglm",
     .plan = plan_glm,
     .own_names = kGlmNames,
     .gguf_pairs = true,
     .folder_pairs = true,
     .partial_rope = true},
}};

}  // namespace

std::span<const Family> families() {
  return kFamilies;
}

const Family* find_family(std::string_view architecture) {
  const auto at = std::find_if(kFamilies.begin(), kFamilies.end(),
                               [&](const Family& f) { return f.architecture == architecture; });
  return at == kFamilies.end() ? nullptr : &*at;
}

const Family* find_gguf_family(std::string_view architecture, bool experts) {
  const auto find = [&](bool with_experts) {
    return std::find_if(kFamilies.begin(), kFamilies.end(),
                        [&](const Family& f) { return f.gguf == architecture && f.experts == with_experts; });
  };
  auto at = find(experts);
  if (at == kFamilies.end()) at = find(!experts);
  return at == kFamilies.end() ? nullptr : &*at;
}

const Family& family_of(const ModelConfig& c) {
  const Family* const family = find_family(c.architecture);
  return family != nullptr ? *family : kFamilies[0];
}

std::vector<TensorName> tensor_names(const Family& family) {
  std::vector<TensorName> names(family.own_names.begin(), family.own_names.end());
  std::vector<Place> taken;
  for (const TensorName& own : names) {
    taken.push_back(own.place);
    if (own.place == Place::qkv) taken.insert(taken.end(), {Place::q, Place::k, Place::v});
    if (own.place == Place::q_and_gate || own.place == Place::latent_q) taken.push_back(Place::q);
    if (own.place == Place::delta_qkv) taken.insert(taken.end(), {Place::qkv, Place::qkv_bias});
    if (own.place == Place::gate_up) taken.insert(taken.end(), {Place::gate, Place::up});
  }
  for (const TensorName& usual : kUsualNames)
    if (std::find(taken.begin(), taken.end(), usual.place) == taken.end()) names.push_back(usual);
  return names;
}

}  // namespace lode
