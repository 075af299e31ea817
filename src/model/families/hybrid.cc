// SPDX-License-Identifier: Apache-2.0
// Qwen3-Next, Qwen3.5 and their mixtures of experts: three layers with a gated delta rule to one of gated attention.
#include <fmt/format.h>

#include <array>

#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/families/plans.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxHeads = 1024, kMaxWidth = 1 << 20;

constexpr auto kNames = joined(
    std::array<TensorName, 22>{{
        {Place::mlp_norm, "model.layers.{}.post_attention_layernorm.weight",
         "blk.{}.post_attention_norm.weight"},
        {Place::q_and_gate, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"},
        {Place::delta_qkvz, "model.layers.{}.linear_attn.in_proj_qkvz.weight", "blk.{}.ssm_in.weight"},
        {Place::delta_qkv, "model.layers.{}.linear_attn.in_proj_qkv.weight", "blk.{}.attn_qkv.weight"},
        {Place::delta_z, "model.layers.{}.linear_attn.in_proj_z.weight", "blk.{}.attn_gate.weight"},
        {Place::delta_ba, "model.layers.{}.linear_attn.in_proj_ba.weight", "blk.{}.ssm_ba.weight"},
        {Place::delta_b, "model.layers.{}.linear_attn.in_proj_b.weight", "blk.{}.ssm_beta.weight"},
        {Place::delta_a, "model.layers.{}.linear_attn.in_proj_a.weight", "blk.{}.ssm_alpha.weight"},
        {Place::delta_conv, "model.layers.{}.linear_attn.conv1d.weight", "blk.{}.ssm_conv1d.weight"},
        {Place::delta_dt_bias, "model.layers.{}.linear_attn.dt_bias", "blk.{}.ssm_dt.bias"},
        {Place::delta_decay, "model.layers.{}.linear_attn.A_log", "blk.{}.ssm_a"},
        {Place::delta_norm, "model.layers.{}.linear_attn.norm.weight", "blk.{}.ssm_norm.weight"},
        {Place::delta_out, "model.layers.{}.linear_attn.out_proj.weight", "blk.{}.ssm_out.weight"},
        {Place::router, "model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"},
        {Place::shared_gate, "model.layers.{}.mlp.shared_expert_gate.weight",
         "blk.{}.ffn_gate_inp_shexp.weight"},
        {Place::gate, "model.layers.{}.mlp.shared_expert.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight"},
        {Place::up, "model.layers.{}.mlp.shared_expert.up_proj.weight", "blk.{}.ffn_up_shexp.weight"},
        {Place::down, "model.layers.{}.mlp.shared_expert.down_proj.weight", "blk.{}.ffn_down_shexp.weight"},
        {Place::gate, "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"},
        {Place::up, "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"},
        {Place::down, "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"},
        {Place::o, "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"},
    }},
    kUsualExperts);

void read_delta(const Json& json, ModelConfig& c, std::string_view where) {
  DeltaPlan& d = c.plan.delta;
  d.key_heads = static_cast<int>(json_int(json, "linear_num_key_heads", where, 1, kMaxHeads));
  d.value_heads = static_cast<int>(json_int(json, "linear_num_value_heads", where, d.key_heads, kMaxHeads));
  d.key_dim = static_cast<int>(json_int(json, "linear_key_head_dim", where, 1, kMaxHeadDim));
  d.value_dim = static_cast<int>(json_int(json, "linear_value_head_dim", where, 1, kMaxHeadDim));
  d.kernel = static_cast<int>(json_int(json, "linear_conv_kernel_dim", where, 1, 64));
  d.tiled = flag(json, "linear_heads_tiled", false, where);  // GGUF files are so
  d.decay_log = flag(json, "linear_decay_log", true, where);
  if (d.value_heads % d.key_heads != 0)
    throw InputError(fmt::format("{}: 'linear_num_value_heads': expected a multiple of {}, found {}", where,
                                 d.key_heads, d.value_heads));
}

}  // namespace

constinit const std::span<const TensorName> kQwenHybridNames = kNames;

void plan_qwen_hybrid(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.activation = activation_of(json, "hidden_act", "silu", where);
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  if (p.q_bias)
    throw InputError(
        fmt::format("{}: 'attention_bias': expected false in this architecture, found true", where));
  p.qk_norm = p.attention_gate = true;
  p.norm_plus_one = flag(json, "norm_plus_one", true, where);  // GGUF files hold the sum
  read_delta(json, c, where);
  const std::int64_t period = whole(json, "full_attention_interval", 4, where, 1, kMaxWindow);
  const auto recurrent =
      layers_called(json, c, "linear_attention", where, [&](int i) { return (i + 1) % period != 0; });
  for (std::size_t i = 0; i < recurrent.size(); ++i) layers_of(c)[i].recurrent = recurrent[i];
  p.draft_layers = static_cast<int>(whole(json, "mtp_num_hidden_layers", 1, where, 0, 64));
  if (!json_has(json, "num_experts")) return;
  read_experts(json, c, "num_experts", where);
  p.experts.normalise = flag(json, "norm_topk_prob", true, where);
  p.experts.shared_gate = true;
  set_expert_layers(json, c, json_int(json, "shared_expert_intermediate_size", where, 1, kMaxWidth), where);
}

}  // namespace lode
