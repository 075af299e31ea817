// SPDX-License-Identifier: Apache-2.0
// DeepSeek-V2 and V3, and models of their shape: attention over latent rows, and a mixture of experts behind some dense
// layers.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/families/plans.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxRank = 1 << 16, kMaxCount = 4096;

constexpr auto kNames = joined(
    std::array<TensorName, 17>{{
        {Place::latent_q, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"},
        {Place::latent_q_a, "model.layers.{}.self_attn.q_a_proj.weight", "blk.{}.attn_q_a.weight"},
        {Place::latent_q_a_norm, "model.layers.{}.self_attn.q_a_layernorm.weight",
         "blk.{}.attn_q_a_norm.weight"},
        {Place::latent_q_b, "model.layers.{}.self_attn.q_b_proj.weight", "blk.{}.attn_q_b.weight"},
        {Place::latent_kv_a, "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
         "blk.{}.attn_kv_a_mqa.weight"},
        {Place::latent_kv_a_norm, "model.layers.{}.self_attn.kv_a_layernorm.weight",
         "blk.{}.attn_kv_a_norm.weight"},
        {Place::latent_k_b, "", "blk.{}.attn_k_b.weight"},
        {Place::latent_v_b, "", "blk.{}.attn_v_b.weight"},
        {Place::latent_kv_b, "model.layers.{}.self_attn.kv_b_proj.weight", "blk.{}.attn_kv_b.weight"},
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

/// KV heads here are the kernels': each has at most so many query heads, and all have the same rows.
constexpr int kMostQueries = 16;

void read_latent(const Json& json, ModelConfig& c, std::string_view where) {
  LatentPlan& p = c.plan.latent;
  const auto rank = [&](const char* key, std::int64_t high) {
    return static_cast<int>(json_int(json, key, where, 1, high));
  };
  p.kv_rank = rank("kv_lora_rank", kMaxHeadDim);
  p.q_rank = static_cast<int>(whole(json, "q_lora_rank", 0, where, 0, kMaxRank));
  p.nope = rank("qk_nope_head_dim", kMaxRank);
  p.rope = rank("qk_rope_head_dim", kMaxHeadDim);
  p.value = rank("v_head_dim", kMaxRank);
  p.interleaved = flag(json, "rope_interleave", true, where);
  if (p.rope % 2 != 0 || p.kv_rank % 2 != 0 || p.row() > kMaxHeadDim)
    throw InputError(fmt::format(
        "{}: 'kv_lora_rank' and 'qk_rope_head_dim': expected even numbers of at most {} together, found "
        "{} and {}",
        where, kMaxHeadDim, p.kv_rank, p.rope));
  c.head_dim = p.row();
  c.plan.rotary_dim = p.rope;
  c.kv_heads = 1;
  while (c.query_heads % c.kv_heads != 0 || c.query_heads / c.kv_heads > kMostQueries) ++c.kv_heads;
  double scale = 1 / std::sqrt(static_cast<double>(p.nope + p.rope));
  if (c.rope_scaling.kind == RopeScaling::Kind::yarn && c.rope_scaling.factor > 1) {
    const double stretch = 0.1 * c.rope_scaling.mscale_all_dim * std::log(c.rope_scaling.factor) + 1;
    scale *= stretch * stretch;
  }
  c.plan.score_scale = scale;
}

void plan_latent(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  if (flag(json, "attention_bias", false, where) || flag(json, "mlp_bias", false, where))
    throw InputError(fmt::format(
        "{}: 'attention_bias', 'mlp_bias': expected false in this architecture, found true", where));
  read_latent(json, c, where);
  c.plan.draft_layers = static_cast<int>(whole(json, "num_nextn_predict_layers", 1, where, 0, 64));
  if (!json_has(json, "n_routed_experts")) return;
  read_experts(json, c, "n_routed_experts", where);
  ExpertPlan& e = c.plan.experts;
  e.scale = number(json, "routed_scaling_factor", 1.0, where, 1e-6, 1e6);
  e.groups = static_cast<int>(whole(json, "n_group", 1, where, 1, e.count));
  e.groups_used = static_cast<int>(whole(json, "topk_group", e.groups, where, 1, e.groups));
  if (e.count % e.groups != 0 || e.used > e.count / e.groups * e.groups_used)
    throw InputError(
        fmt::format("{}: 'n_group' and 'topk_group': expected groups of one size with at least {} experts "
                    "to choose from, found {} experts in {} groups, {} of them used",
                    where, e.used, e.count, e.groups, e.groups_used));
  const std::int64_t dense = whole(json, "first_k_dense_replace", 0, where, 0, c.layers);
  const std::int64_t shared = whole(json, "n_shared_experts", 0, where, 0, kMaxCount) * e.width;
  std::vector<LayerPlan>& layers = layers_of(c);
  for (std::size_t i = static_cast<std::size_t>(dense); i < layers.size(); ++i) {
    layers[i].experts = true;
    layers[i].width = shared;
  }
}

}  // namespace

constinit const std::span<const TensorName> kDeepseekNames = kNames;

namespace {

/// Versions differ in what a configuration means that does not say how experts are scored.
void plan_deepseek(const Json& json, ModelConfig& c, const char* usual, std::string_view where) {
  plan_latent(json, c, where);
  ExpertPlan& e = c.plan.experts;
  const std::string score = json_has(json, "scoring_func") ? json_string(json, "scoring_func", where) : usual;
  const std::string method = json_has(json, "topk_method") ? json_string(json, "topk_method", where) : "";
  if (score != "softmax" && score != "sigmoid")
    throw InputError(
        fmt::format("{}: 'scoring_func': expected softmax or sigmoid, found '{}'", where, excerpt(score)));
  if (method == "greedy") e.groups = e.groups_used = 1;
  e.choice_bias = score == "sigmoid";
  e.score = e.choice_bias ? ExpertPlan::Score::sigmoid : ExpertPlan::Score::softmax;
  e.normalise = flag(json, "norm_topk_prob", e.choice_bias, where);
  e.group_best = e.choice_bias && e.groups > 1 ? std::min(2, e.count / e.groups) : 1;
}

}  // namespace

void plan_deepseek_v2(const Json& json, ModelConfig& c, std::string_view where) {
  plan_deepseek(json, c, "softmax", where);
}

void plan_deepseek_v3(const Json& json, ModelConfig& c, std::string_view where) {
  plan_deepseek(json, c, "sigmoid", where);
}

}  // namespace lode
