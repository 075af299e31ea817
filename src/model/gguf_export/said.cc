// SPDX-License-Identifier: Apache-2.0
// Whether a GGUF file says of a model all that its folder says: read back before anything is written, as readers take
// much that they find no key for as usual.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "io/gguf.h"
#include "kernels/rope.h"
#include "lodestone/error.h"
#include "model/gguf_config.h"
#include "model/gguf_export/parts.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

/// Equal but for float32's rounding of a few steps.
bool near(double a, double b) {
  constexpr double kRounding = 2e-6, kNothing = 1e-20;
  return std::abs(a - b) <= kRounding * std::max(std::abs(a), std::abs(b)) + kNothing;
}

bool same_rope(const ModelConfig& a, const ModelConfig& b) {
  if (a.rope_scaling.kind == RopeScaling::Kind::dynamic) return false;  // depends on the text's length
  for (const std::int64_t tokens :
       {a.max_positions, std::max<std::int64_t>(1, a.rope_scaling.original_max_positions)}) {
    const Rope x(a, tokens), y(b, tokens);
    if (!std::ranges::equal(x.frequencies(), y.frequencies(), near) ||
        !near(x.attention_scaling(), y.attention_scaling()))
      return false;
  }
  return a.plan.rotary_dim == b.plan.rotary_dim && near(a.plan.local_theta, b.plan.local_theta) &&
         near(a.plan.query_growth, b.plan.query_growth) &&
         (a.plan.query_growth == 0 || a.plan.query_growth_start == b.plan.query_growth_start);
}

bool same_sizes(const ModelConfig& a, const ModelConfig& b) {
  for (int i = 0; i < a.layers && a.layers == b.layers; ++i)
    if (a.head_dim_of(i) != b.head_dim_of(i) || a.kv_heads_of(i) != b.kv_heads_of(i) ||
        feed_forward_width(a, i) != feed_forward_width(b, i))
      return false;
  return a.hidden == b.hidden && a.layers == b.layers && a.query_heads == b.query_heads &&
         a.vocab == b.vocab && a.max_positions == b.max_positions && near(a.norm_eps, b.norm_eps) &&
         a.tied_embeddings == b.tied_embeddings;
}

bool same_experts(const ModelConfig& a, const ModelConfig& b) {
  for (int i = 0; i < a.layers; ++i)
    if (a.plan.layer(i).experts != b.plan.layer(i).experts) return false;
  ExpertPlan x = a.plan.experts, y = b.plan.experts;
  if (near(x.scale, y.scale)) x.scale = y.scale;
  return x == y;
}

bool same_attention(const ModelPlan& a, const ModelPlan& b) {
  return a.q_bias == b.q_bias && a.k_bias == b.k_bias && a.v_bias == b.v_bias && a.o_bias == b.o_bias &&
         a.qk_norm == b.qk_norm && a.v_norm == b.v_norm && a.attention_gate == b.attention_gate &&
         a.sinks == b.sinks && a.latent == b.latent;
}

bool same_feed_forward(const ModelPlan& a, const ModelPlan& b) {
  return a.activation == b.activation && near(a.activation_limit, b.activation_limit) &&
         a.gate_bias == b.gate_bias && a.up_bias == b.up_bias && a.down_bias == b.down_bias;
}

bool same_stream(const ModelConfig& x, const ModelConfig& y) {
  const ModelPlan &a = x.plan, &b = y.plan;
  return a.post_norms == b.post_norms && near(a.embedding_multiplier, b.embedding_multiplier) &&
         near(a.residual_multiplier, b.residual_multiplier) && near(a.logit_divisor, b.logit_divisor) &&
         near(a.logit_cap, b.logit_cap) && a.layer_factor == b.layer_factor && a.inputs == b.inputs &&
         near(score_scale(x), score_scale(y));
}

/// Files hold other forms of these: the decay itself, heads in another order.
bool same_recurrence(const ModelPlan& a, const ModelPlan& b) {
  DeltaPlan x = a.delta;
  x.tiled = b.delta.tiled;
  x.decay_log = b.delta.decay_log;
  return x == b.delta;
}

bool same_layers(const ModelConfig& a, const ModelConfig& b, auto member) {
  for (int i = 0; i < a.layers; ++i)
    if (a.plan.layer(i).*member != b.plan.layer(i).*member) return false;
  return true;
}

/// The first thing that differs; empty: nothing does.
std::string_view difference(const ModelConfig& a, const ModelConfig& b) {
  if (!same_sizes(a, b)) return "sizes of layers";
  if (!same_layers(a, b, &LayerPlan::window)) return "sliding windows";
  if (!same_layers(a, b, &LayerPlan::turn)) return "a choice of layers without RoPE";
  if (!same_rope(a, b)) return "a kind of RoPE scaling";
  if (!same_layers(a, b, &LayerPlan::recurrent) || !same_recurrence(a.plan, b.plan))
    return "recurrent layers";
  if (!same_layers(a, b, &LayerPlan::value_is_key) || !same_layers(a, b, &LayerPlan::rows_of))
    return "layers with others' keys";
  if (!same_experts(a, b)) return "a kind of experts";
  if (!same_attention(a.plan, b.plan)) return "biases or norms in attention";
  if (!same_feed_forward(a.plan, b.plan)) return "a kind of feed-forward";
  if (!same_stream(a, b)) return "multipliers";
  return {};
}

}  // namespace

void expect_said(const ModelConfig& c, const GgufWriter& metadata, std::span<const GgufTarget> targets,
                 std::span<const RopeVector> vectors, std::string_view where) {
  const std::string bytes = metadata.metadata_alone();
  GgufFile file = parse_gguf(std::as_bytes(std::span(bytes)), where);
  for (const GgufTarget& target : targets)
    file.tensors[target.name] = {.type = WeightType::f32, .shape = target.shape, .bytes = {}, .where = {}};
  for (const RopeVector& v : vectors)
    file.tensors[v.name] = {.type = WeightType::f32,
                            .shape = {std::ssize(v.numbers)},
                            .bytes = std::as_bytes(std::span(v.numbers)),
                            .where = {}};
  const std::string_view found = difference(c, config_of_gguf(GgufModel::of(std::move(file))));
  if (!found.empty())
    throw InputError(fmt::format(
        "{}: expected a model that a GGUF file can describe, found a {} with {} that the format has no "
        "words for: use the folder itself",
        where, family_of(c).name, found));
}

}  // namespace lode
