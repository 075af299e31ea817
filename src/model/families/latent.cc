// SPDX-License-Identifier: Apache-2.0
// DeepSeek-V2 and V3, and models of their shape (Kimi K2, GLM-4.7 Flash): attention over latent rows, and a mixture of
// experts behind some dense layers.
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

constexpr std::int64_t kMaxRank = 1 << 16;

constexpr auto kNames =
    joined(std::array<TensorName, 9>{{
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
           }},
           kSharedExperts);

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
}

}  // namespace

constinit const std::span<const TensorName> kDeepseekNames = kNames;

// Versions differ in what a configuration means that does not say how experts are scored.
void plan_deepseek_v2(const Json& json, ModelConfig& c, std::string_view where) {
  plan_latent(json, c, where);
  read_shared_experts(json, c, {.score = "softmax", .dense_layers = 0}, where);
}

void plan_deepseek_v3(const Json& json, ModelConfig& c, std::string_view where) {
  plan_latent(json, c, where);
  read_shared_experts(json, c, {.score = "sigmoid", .dense_layers = 0}, where);
}

void plan_glm_lite(const Json& json, ModelConfig& c, std::string_view where) {
  plan_latent(json, c, where);
  read_shared_experts(json, c, {.score = "sigmoid", .dense_layers = 1}, where);
}

}  // namespace lode
