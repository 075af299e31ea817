// SPDX-License-Identifier: Apache-2.0
// Families whose feed-forward is a mixture of experts, and attends as the dense ones do.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/text.h"
#include "lodestone/error.h"
#include "model/families/plans.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxExperts = 4096, kMaxWidth = 1 << 20, kMaxShared = 4096;

constexpr std::array<TensorName, 4> kMixtral = {{
    {Place::router, "model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight"},
    {Place::expert_gate, "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
     "blk.{}.ffn_gate_exps.weight"},
    {Place::expert_up, "model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "blk.{}.ffn_up_exps.weight"},
    {Place::expert_down, "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
     "blk.{}.ffn_down_exps.weight"},
}};

constexpr auto kQwenMoe =
    joined(std::array<TensorName, 1>{{
               {Place::router, "model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"},
           }},
           kUsualExperts);

constexpr auto kTransposed = TensorForm::transposed;
constexpr auto kMxfp4 = TensorForm::mxfp4;
constexpr std::array<TensorName, 14> kGptOss = {{
    {Place::sinks, "model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight"},
    {Place::mlp_norm, "model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight"},
    {Place::router, "model.layers.{}.mlp.router.weight", "blk.{}.ffn_gate_inp.weight"},
    {Place::router_bias, "model.layers.{}.mlp.router.bias", "blk.{}.ffn_gate_inp.bias"},
    {Place::expert_gate_up, "model.layers.{}.mlp.experts.gate_up_proj", "", kMxfp4},
    {Place::expert_gate_up, "model.layers.{}.mlp.experts.gate_up_proj", "", kTransposed},
    {Place::expert_gate, "", "blk.{}.ffn_gate_exps.weight"},
    {Place::expert_up, "", "blk.{}.ffn_up_exps.weight"},
    {Place::expert_down, "model.layers.{}.mlp.experts.down_proj", "", kMxfp4},
    {Place::expert_down, "model.layers.{}.mlp.experts.down_proj", "blk.{}.ffn_down_exps.weight", kTransposed},
    {Place::expert_gate_up_bias, "model.layers.{}.mlp.experts.gate_up_proj_bias", "", kTransposed},
    {Place::expert_gate_bias, "", "blk.{}.ffn_gate_exps.bias"},
    {Place::expert_up_bias, "", "blk.{}.ffn_up_exps.bias"},
    {Place::expert_down_bias, "model.layers.{}.mlp.experts.down_proj_bias", "blk.{}.ffn_down_exps.bias"},
}};

constexpr auto kGlmMoe = joined(std::array<TensorName, 1>{{
                                    {Place::mlp_norm, "model.layers.{}.post_attention_layernorm.weight",
                                     "blk.{}.post_attention_norm.weight"},
                                }},
                                kSharedExperts);

/// Every layer has experts in place of the feed-forward of all tokens.
void experts_alone(ModelConfig& c) {
  for (LayerPlan& layer : layers_of(c)) {
    layer.experts = true;
    layer.width = 0;
  }
}

}  // namespace

constinit const std::span<const TensorName> kMixtralNames = kMixtral, kQwenMoeNames = kQwenMoe,
                                            kGptOssNames = kGptOss, kGlmMoeNames = kGlmMoe;

void read_experts(const Json& json, ModelConfig& c, const char* count, std::string_view where) {
  ExpertPlan& e = c.plan.experts;
  e.count = static_cast<int>(json_int(json, count, where, 1, kMaxExperts));
  e.used = static_cast<int>(json_int(json, "num_experts_per_tok", where, 1, e.count));
  e.width = whole(json, "moe_intermediate_size", c.intermediate, where, 1, kMaxWidth);
}

void set_expert_layers(const Json& json, ModelConfig& c, std::int64_t shared, std::string_view where) {
  const std::int64_t step = whole(json, "decoder_sparse_step", 1, where, 1, kMaxWindow);
  std::vector<LayerPlan>& layers = layers_of(c);
  for (std::size_t i = 0; i < layers.size(); ++i)
    layers[i].experts = (static_cast<std::int64_t>(i) + 1) % step == 0;
  if (json_has(json, "mlp_only_layers")) {
    const Json& dense = json["mlp_only_layers"];
    if (!dense.is_array())
      throw InputError(
          fmt::format("{}: 'mlp_only_layers': expected a list, found {}", where, dense.type_name()));
    for (const Json& layer : dense)
      layers[static_cast<std::size_t>(
                 json_int({{"mlp_only_layers", layer}}, "mlp_only_layers", where, 0, c.layers - 1))]
          .experts = false;
  }
  for (LayerPlan& layer : layers)
    if (layer.experts) layer.width = shared;
}

namespace {

/// Of each layer whether it has experts: by a list, else all but the first ones.
std::vector<bool> layers_with_experts(const Json& json, const ModelConfig& c, std::int64_t dense,
                                      std::string_view where) {
  std::vector<bool> with(static_cast<std::size_t>(c.layers));
  if (!json_has(json, "mlp_layer_types")) {
    dense = whole(json, "first_k_dense_replace", dense, where, 0, c.layers);
    std::fill(with.begin() + dense, with.end(), true);
    return with;
  }
  const Json& types = json["mlp_layer_types"];
  if (!types.is_array() || std::ssize(types) != c.layers)
    throw InputError(fmt::format("{}: 'mlp_layer_types': expected a list of {} names", where, c.layers));
  for (std::size_t i = 0; i < with.size(); ++i) {
    const std::string type = types[i].is_string() ? types[i].get<std::string>() : types[i].dump();
    if (type != "sparse" && type != "dense")
      throw InputError(fmt::format("{}: 'mlp_layer_types': expected sparse or dense for layer {}, found '{}'",
                                   where, i, excerpt(type)));
    with[i] = type == "sparse";
  }
  return with;
}

void read_expert_score(const Json& json, ExpertPlan& e, const char* usual, std::string_view where) {
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

void read_shared_experts(const Json& json, ModelConfig& c, const SharedExpertsUsual& usual,
                         std::string_view where) {
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
  read_expert_score(json, e, usual.score, where);
  const std::int64_t shared = whole(json, "n_shared_experts", 0, where, 0, kMaxShared) * e.width;
  const std::vector<bool> with = layers_with_experts(json, c, usual.dense_layers, where);
  std::vector<LayerPlan>& layers = layers_of(c);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!with[i]) continue;
    layers[i].experts = true;
    layers[i].width = shared;
  }
}

void plan_glm_moe(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.activation = activation_of(json, "hidden_act", "silu", where);
  p.q_bias = p.k_bias = p.v_bias = flag(json, "attention_bias", false, where);
  p.qk_norm = flag(json, "use_qk_norm", false, where);
  read_shared_experts(json, c, {.score = "sigmoid", .dense_layers = 1}, where);
}

void plan_mixtral(const Json& json, ModelConfig& c, std::string_view where) {
  c.plan.activation = activation_of(json, "hidden_act", "silu", where);
  read_experts(json, c, "num_local_experts", where);
  c.plan.experts.normalise = true;
  experts_alone(c);
  const bool all = json_has(json, "sliding_window");
  set_windows(json, c, windowed_layers(json, c, where, [&](int) { return all; }), where);
}

void plan_qwen3_moe(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.activation = activation_of(json, "hidden_act", "silu", where);
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.qk_norm = true;
  read_experts(json, c, json_has(json, "num_experts") ? "num_experts" : "num_local_experts", where);
  p.experts.normalise = flag(json, "norm_topk_prob", false, where);
  set_expert_layers(json, c, 0, where);
  qwen_windows(json, c, where);
}

void plan_gpt_oss(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  if (json_has(json, "swiglu_alpha") && json_number(json, "swiglu_alpha", where, 0, 1e3) != 1.702)
    throw InputError(fmt::format("{}: 'swiglu_alpha': expected 1.702, found {}", where,
                                 json_number(json, "swiglu_alpha", where, 0, 1e3)));
  p.activation = ActivationKind::clamped_silu;
  p.activation_limit = number(json, "swiglu_limit", 7.0, where, 1e-6, kHuge);
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", true, where);
  p.sinks = true;
  read_experts(json, c, "num_local_experts", where);
  p.experts.score_chosen = p.experts.router_bias = p.experts.biases = true;
  experts_alone(c);
  set_windows(json, c, windowed_layers(json, c, where, [](int i) { return i % 2 == 0; }), where);
}

}  // namespace lode
