// SPDX-License-Identifier: Apache-2.0
// The text part of Gemma 4: layers with a window and layers without have heads of different sizes; the last layers
// attend to the keys and values of earlier ones; values may be keys that were not normalised by gains and do not turn;
// each layer may be given numbers of its own for each token; a mixture of experts may stand beside the feed-forward.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/families/plans.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxHeads = 1024, kMaxInputs = 1 << 16, kMaxVocab = 4 << 20;

constexpr std::array<TensorName, 20> kNames = {{
    {Place::attention_post_norm, "model.layers.{}.post_attention_layernorm.weight",
     "blk.{}.post_attention_norm.weight"},
    {Place::mlp_norm, "model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight"},
    {Place::mlp_post_norm, "model.layers.{}.post_feedforward_layernorm.weight",
     "blk.{}.post_ffw_norm.weight"},
    {Place::layer_factor, "model.layers.{}.layer_scalar", "blk.{}.layer_output_scale.weight"},
    {Place::input_embedding, "model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"},
    {Place::input_projection, "model.per_layer_model_projection.weight", "per_layer_model_proj.weight"},
    {Place::input_projection_norm, "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"},
    {Place::input_gate, "model.layers.{}.per_layer_input_gate.weight", "blk.{}.inp_gate.weight"},
    {Place::input_out, "model.layers.{}.per_layer_projection.weight", "blk.{}.proj.weight"},
    {Place::input_norm, "model.layers.{}.post_per_layer_input_norm.weight", "blk.{}.post_norm.weight"},
    {Place::dense_post_norm, "model.layers.{}.post_feedforward_layernorm_1.weight",
     "blk.{}.post_ffw_norm_1.weight"},
    {Place::experts_norm, "model.layers.{}.pre_feedforward_layernorm_2.weight",
     "blk.{}.pre_ffw_norm_2.weight"},
    {Place::experts_post_norm, "model.layers.{}.post_feedforward_layernorm_2.weight",
     "blk.{}.post_ffw_norm_2.weight"},
    {Place::router, "model.layers.{}.router.proj.weight", "blk.{}.ffn_gate_inp.weight"},
    {Place::router_norm, "model.layers.{}.router.scale", "blk.{}.ffn_gate_inp.scale"},
    {Place::expert_factors, "model.layers.{}.router.per_expert_scale", "blk.{}.ffn_down_exps.scale"},
    {Place::expert_gate_up, "model.layers.{}.experts.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight"},
    {Place::expert_gate, "", "blk.{}.ffn_gate_exps.weight"},
    {Place::expert_up, "", "blk.{}.ffn_up_exps.weight"},
    {Place::expert_down, "model.layers.{}.experts.down_proj", "blk.{}.ffn_down_exps.weight"},
}};

/// Heads of the layers with a window, where the model's are those of the others.
void set_heads(const Json& json, ModelConfig& c, const std::vector<bool>& windowed, std::string_view where) {
  const auto dim = static_cast<int>(whole(json, "head_dim", 256, where, 4, kMaxHeadDim));
  if (dim % 2 != 0)
    throw InputError(fmt::format("{}: 'head_dim': expected an even number, found {}", where, dim));
  const bool value_is_key = flag(json, "attention_k_eq_v", false, where);
  const int in_windows = c.kv_heads;
  if (value_is_key)
    c.kv_heads = static_cast<int>(whole(json, "num_global_key_value_heads", c.kv_heads, where, 1, kMaxHeads));
  if (c.query_heads % c.kv_heads != 0 || c.query_heads / c.kv_heads > 16)
    throw InputError(
        fmt::format("{}: expected 'num_attention_heads' to be 1 to 16 times 'num_global_key_value_heads', "
                    "found {} and {}",
                    where, c.query_heads, c.kv_heads));
  std::vector<LayerPlan>& layers = layers_of(c);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].value_is_key = value_is_key && !windowed[i];
    if (!windowed[i]) continue;
    layers[i].turn = Turn::local;
    layers[i].kv_heads = in_windows == c.kv_heads ? 0 : in_windows;
    layers[i].head_dim = dim == c.head_dim ? 0 : dim;
  }
}

/// The last layers have the rows of the last one of their kind before them.
void share_rows(const Json& json, ModelConfig& c, const std::vector<bool>& windowed, std::string_view where) {
  const std::int64_t shared = whole(json, "num_kv_shared_layers", 0, where, 0, c.layers - 1);
  const auto first = static_cast<std::size_t>(c.layers - shared);
  for (std::size_t i = first; i < windowed.size(); ++i) {
    std::size_t from = first;
    while (from > 0 && windowed[from - 1] != windowed[i]) --from;
    if (from == 0)
      throw InputError(
          fmt::format("{}: 'num_kv_shared_layers': expected a layer of each kind before the last {}, found "
                      "none like layer {}",
                      where, shared, i));
    layers_of(c)[i].rows_of = static_cast<int>(from - 1);
    if (flag(json, "use_double_wide_mlp", false, where)) layers_of(c)[i].width = 2 * c.intermediate;
  }
}

void add_experts(const Json& json, ModelConfig& c, std::string_view where) {
  if (!flag(json, "enable_moe_block", false, where)) return;
  Json renamed = json;
  if (json_has(json, "top_k_experts")) renamed["num_experts_per_tok"] = json["top_k_experts"];
  read_experts(renamed, c, "num_experts", where);
  c.plan.experts.normalise = c.plan.experts.apart = true;
  for (LayerPlan& layer : layers_of(c)) layer.experts = true;
}

}  // namespace

constinit const std::span<const TensorName> kGemma4Names = kNames;

void plan_gemma4(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  if (json_has(json, "per_layer_config"))
    throw InputError(
        fmt::format("{}: 'per_layer_config': expected 'global_head_dim' and 'num_global_key_value_heads' in "
                    "its place, found a "
                    "list of layers: not supported",
                    where));
  if (json_has(json, "use_bidirectional_attention") && json["use_bidirectional_attention"] == Json("all"))
    throw InputError(fmt::format(
        "{}: 'use_bidirectional_attention': expected null or vision, found all: such a model writes no text",
        where));
  p.activation = activation_of(json, "hidden_activation", "gelu_pytorch_tanh", where);
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.qk_norm = p.v_norm = p.post_norms = p.layer_factor = true;
  p.score_scale = 1.0;
  p.embedding_multiplier = std::sqrt(static_cast<double>(c.hidden));
  p.logit_cap = number(json, "final_logit_softcapping", 0.0, where, 1e-6, kHuge);
  auto windowed = windowed_layers(json, c, where, [](int i) { return (i + 1) % 6 != 0; });
  windowed.back() = false;
  set_windows(json, c, windowed, where);
  const Json& local = json_member(json_member(json, "rope_parameters"), "sliding_attention");
  p.local_theta = number(local, "rope_theta", number(json, "rope_local_base_freq", 10000.0, where, 2, kHuge),
                         where, 2, kHuge);
  if (number(local, "partial_rotary_factor", 1.0, where, 0.0, 1.0) != 1.0)
    throw InputError(
        fmt::format("{}: 'sliding_attention': expected heads that turn whole, found a share of them", where));
  set_heads(json, c, windowed, where);
  share_rows(json, c, windowed, where);
  const bool none =
      json.contains("hidden_size_per_layer_input") && json["hidden_size_per_layer_input"].is_null();
  p.inputs.width =
      static_cast<int>(whole(json, "hidden_size_per_layer_input", none ? 0 : 256, where, 0, kMaxInputs));
  if (p.inputs.width > 0)
    p.inputs.vocab = whole(json, "vocab_size_per_layer_input", c.vocab, where, 1, kMaxVocab);
  add_experts(json, c, where);
}

}  // namespace lode
