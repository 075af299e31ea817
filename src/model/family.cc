// SPDX-License-Identifier: Apache-2.0
#include "model/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxWindow = std::int64_t{1} << 30;
constexpr double kHuge = 1e15;

bool flag(const Json& json, const char* key, bool otherwise, std::string_view where) {
  return json_has(json, key) ? json_bool(json, key, where) : otherwise;
}
double number(const Json& json, const char* key, double otherwise, std::string_view where, double low,
              double high) {
  return json_has(json, key) ? json_number(json, key, where, low, high) : otherwise;
}
std::int64_t whole(const Json& json, const char* key, std::int64_t otherwise, std::string_view where,
                   std::int64_t low, std::int64_t high) {
  return json_has(json, key) ? json_int(json, key, where, low, high) : otherwise;
}

ActivationKind activation_of(const Json& json, const char* key, std::string_view usual,
                             std::string_view where) {
  const std::string name = json_has(json, key) ? json_string(json, key, where) : std::string(usual);
  if (name == "silu" || name == "swish") return ActivationKind::silu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return ActivationKind::gelu_tanh;
  throw InputError(
      fmt::format("{}: '{}': expected silu or gelu_pytorch_tanh, found '{}'", where, key, excerpt(name)));
}

void all_biases(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.gate_bias = p.up_bias = p.down_bias = flag(json, "mlp_bias", false, where);
}

std::vector<LayerPlan>& layers_of(ModelConfig& c) {
  c.plan.layers.resize(static_cast<std::size_t>(c.layers));
  return c.plan.layers;
}

/// Whether layer i has a window: as `layer_types` says, or the family's rule where there is none.
template <class Rule>
std::vector<bool> windowed_layers(const Json& json, const ModelConfig& c, std::string_view where,
                                  const Rule& rule) {
  std::vector<bool> windowed(static_cast<std::size_t>(c.layers));
  if (!json_has(json, "layer_types")) {
    for (int i = 0; i < c.layers; ++i) windowed[static_cast<std::size_t>(i)] = rule(i);
    return windowed;
  }
  const Json& types = json["layer_types"];
  if (!types.is_array() || std::ssize(types) != c.layers)
    throw InputError(fmt::format("{}: 'layer_types': expected a list of {} types", where, c.layers));
  for (std::size_t i = 0; i < windowed.size(); ++i) {
    const std::string type = types[i].is_string() ? types[i].get<std::string>() : types[i].type_name();
    if (type != "full_attention" && type != "sliding_attention")
      throw InputError(
          fmt::format("{}: 'layer_types': expected full_attention or sliding_attention, found '{}'", where,
                      excerpt(type)));
    windowed[i] = type == "sliding_attention";
  }
  return windowed;
}

void set_windows(const Json& json, ModelConfig& c, const std::vector<bool>& windowed,
                 std::string_view where) {
  if (std::none_of(windowed.begin(), windowed.end(), [](bool w) { return w; })) return;
  const std::int64_t window = json_int(json, "sliding_window", where, 1, kMaxWindow);
  for (std::size_t i = 0; i < windowed.size(); ++i) layers_of(c)[i].window = windowed[i] ? window : 0;
}

void refuse_window(const Json& json, std::string_view where) {
  if (!json_has(json, "sliding_window")) return;
  throw InputError(fmt::format("{}: 'sliding_window': expected null in this architecture, found {}", where,
                               json_int(json, "sliding_window", where, 0, kMaxWindow)));
}

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

/// Windows from layer max_window_layers on, where they are switched on.
void qwen_windows(const Json& json, ModelConfig& c, std::string_view where) {
  if (!flag(json, "use_sliding_window", false, where)) return;
  const std::int64_t first = whole(json, "max_window_layers", 28, where, 0, kMaxWindow);
  set_windows(json, c, windowed_layers(json, c, where, [&](int i) { return i >= first; }), where);
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
    throw InputError(
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
    throw InputError(
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

constexpr std::array<TensorName, 21> kUsualNames = {{
    {Place::embedding, "model.embed_tokens.weight", "token_embd.weight"},
    {Place::final_norm, "model.norm.weight", "output_norm.weight"},
    {Place::output, "lm_head.weight", "output.weight"},
    {Place::attention_norm, "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"},
    {Place::q, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"},
    {Place::k, "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"},
    {Place::v, "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"},
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

// SmolLM2 is a Llama.
constexpr std::array<Family, 9> kFamilies = {{
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

const Family* find_gguf_family(std::string_view architecture) {
  const auto at = std::find_if(kFamilies.begin(), kFamilies.end(),
                               [&](const Family& f) { return f.gguf == architecture; });
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
    if (own.place == Place::gate_up) taken.insert(taken.end(), {Place::gate, Place::up});
  }
  for (const TensorName& usual : kUsualNames)
    if (std::find(taken.begin(), taken.end(), usual.place) == taken.end()) names.push_back(usual);
  return names;
}

}  // namespace lode
