// SPDX-License-Identifier: Apache-2.0
#include "model/weight_shapes.h"

#include "lodestone/error.h"

namespace lode {

bool in_layer(Place place) {
  return place != Place::embedding && place != Place::final_norm && place != Place::output &&
         place != Place::input_embedding && place != Place::input_projection &&
         place != Place::input_projection_norm;
}

std::int64_t feed_forward_width(const ModelConfig& c, int layer) {
  const std::int64_t width = c.plan.layer(layer).width;
  return width == LayerPlan::kUsual ? c.intermediate : width;
}

namespace {

bool has_expert_weight(Place place, const ExpertPlan& e) {
  switch (place) {
    case Place::router_bias:
      return e.router_bias;
    case Place::choice_bias:
      return e.choice_bias;
    case Place::shared_gate:
      return e.shared_gate;
    case Place::expert_gate_bias:
    case Place::expert_up_bias:
    case Place::expert_gate_up_bias:
    case Place::expert_down_bias:
      return e.biases;
    default:
      return true;
  }
}

bool is_delta(Place place) {
  return place >= Place::delta_qkv && place <= Place::delta_out;
}

bool is_latent(Place place) {
  return place >= Place::latent_q && place <= Place::latent_v_b;
}

bool is_attention(Place place) {
  return (place >= Place::q && place <= Place::o_bias) || place == Place::sinks || place == Place::q_and_gate;
}

}  // namespace

bool has_weight(Place place, const ModelConfig& c, int layer) {
  const ModelPlan& p = c.plan;
  const bool dense = !in_layer(place) || feed_forward_width(c, layer) > 0;
  const bool recurrent = in_layer(place) && p.layer(layer).recurrent;
  if (is_delta(place)) return recurrent;
  if (recurrent && is_attention(place)) return false;
  if (is_latent(place)) {
    const bool low =
        place == Place::latent_q_a || place == Place::latent_q_a_norm || place == Place::latent_q_b;
    return p.latent.kv_rank > 0 &&
           (place == Place::latent_q ? p.latent.q_rank == 0 : !low || p.latent.q_rank > 0);
  }
  if (p.latent.kv_rank > 0 && (place == Place::q || place == Place::k || place == Place::v)) return false;
  switch (place) {
    case Place::q:
      return !p.attention_gate;
    case Place::q_and_gate:
      return p.attention_gate;
    case Place::k:
      return p.layer(layer).own_rows();
    case Place::v:
      return p.layer(layer).own_rows() && !p.layer(layer).value_is_key;
    case Place::q_bias:
    case Place::qkv_bias:
      return p.q_bias;
    case Place::k_bias:
      return p.k_bias && p.layer(layer).own_rows();
    case Place::v_bias:
      return p.v_bias && p.layer(layer).own_rows() && !p.layer(layer).value_is_key;
    case Place::o_bias:
      return p.o_bias;
    case Place::q_norm:
      return p.qk_norm;
    case Place::k_norm:
      return p.qk_norm && p.layer(layer).own_rows();
    case Place::layer_factor:
      return p.layer_factor;
    case Place::input_embedding:
    case Place::input_projection:
    case Place::input_projection_norm:
    case Place::input_gate:
    case Place::input_out:
    case Place::input_norm:
      return p.inputs.width > 0;
    case Place::dense_post_norm:
    case Place::experts_norm:
    case Place::experts_post_norm:
    case Place::router_norm:
    case Place::expert_factors:
      return p.layer(layer).experts && p.experts.apart;
    case Place::sinks:
      return p.sinks;
    case Place::attention_post_norm:
    case Place::mlp_post_norm:
      return p.post_norms;
    case Place::gate:
    case Place::up:
    case Place::gate_up:
    case Place::down:
      return dense;
    case Place::gate_bias:
      return dense && p.gate_bias;
    case Place::up_bias:
      return dense && p.up_bias;
    case Place::down_bias:
      return dense && p.down_bias;
    case Place::router:
    case Place::router_bias:
    case Place::choice_bias:
    case Place::shared_gate:
    case Place::expert_gate:
    case Place::expert_up:
    case Place::expert_gate_up:
    case Place::expert_down:
    case Place::expert_gate_bias:
    case Place::expert_up_bias:
    case Place::expert_gate_up_bias:
    case Place::expert_down_bias:
      return p.layer(layer).experts && has_expert_weight(place, p.experts);
    default:
      return true;
  }
}

std::vector<std::int64_t> shape_of(Place place, const ModelConfig& c, int layer) {
  const int head_dim = in_layer(place) ? c.head_dim_of(layer) : c.head_dim;
  const std::int64_t q = std::int64_t{c.query_heads} * head_dim,
                     kv = std::int64_t{in_layer(place) ? c.kv_heads_of(layer) : c.kv_heads} * head_dim;
  const std::int64_t width = in_layer(place) ? feed_forward_width(c, layer) : 0;
  const std::int64_t inputs = c.plan.inputs.width;
  const ExpertPlan& e = c.plan.experts;
  const DeltaPlan& delta = c.plan.delta;
  const LatentPlan& latent = c.plan.latent;
  const std::int64_t unrotated = std::int64_t{c.query_heads} * (latent.nope + latent.rope);
  switch (place) {
    case Place::embedding:
    case Place::output:
      return {c.vocab, c.hidden};
    case Place::q:
      return {q, c.hidden};
    case Place::k:
    case Place::v:
      return {kv, c.hidden};
    case Place::qkv:
      return {q + 2 * kv, c.hidden};
    case Place::q_bias:
      return {q};
    case Place::qkv_bias:
      return {q + 2 * kv};
    case Place::k_bias:
    case Place::v_bias:
      return {kv};
    case Place::q_norm:
    case Place::k_norm:
      return {head_dim};
    case Place::layer_factor:
      return {1};
    case Place::input_embedding:
      return {c.plan.inputs.vocab, c.layers * inputs};
    case Place::input_projection:
      return {c.layers * inputs, c.hidden};
    case Place::input_projection_norm:
      return {inputs};
    case Place::input_gate:
      return {inputs, c.hidden};
    case Place::input_out:
      return {c.hidden, inputs};
    case Place::expert_factors:
      return {e.count};
    case Place::sinks:
      return {c.query_heads};
    case Place::o:
      return {c.hidden, c.plan.latent.kv_rank > 0 ? std::int64_t{c.query_heads} * c.plan.latent.value : q};
    case Place::gate:
    case Place::up:
      return {width, c.hidden};
    case Place::gate_up:
      return {2 * width, c.hidden};
    case Place::gate_bias:
    case Place::up_bias:
      return {width};
    case Place::down:
      return {c.hidden, width};
    case Place::final_norm:
    case Place::attention_norm:
    case Place::attention_post_norm:
    case Place::mlp_norm:
    case Place::mlp_post_norm:
    case Place::o_bias:
    case Place::down_bias:
    case Place::shared_gate:
    case Place::input_norm:
    case Place::dense_post_norm:
    case Place::experts_norm:
    case Place::experts_post_norm:
    case Place::router_norm:
      return {c.hidden};
    case Place::latent_q:
      return {unrotated, c.hidden};
    case Place::latent_q_a:
      return {latent.q_rank, c.hidden};
    case Place::latent_q_a_norm:
      return {latent.q_rank};
    case Place::latent_q_b:
      return {unrotated, latent.q_rank};
    case Place::latent_kv_a:
      return {latent.row(), c.hidden};
    case Place::latent_kv_a_norm:
      return {latent.kv_rank};
    case Place::latent_kv_b:
      return {std::int64_t{c.query_heads} * (latent.nope + latent.value), latent.kv_rank};
    case Place::latent_k_b:
      return {c.query_heads, latent.kv_rank, latent.nope};
    case Place::latent_v_b:
      return {c.query_heads, latent.value, latent.kv_rank};
    case Place::q_and_gate:
      return {2 * q, c.hidden};
    case Place::delta_qkv:
      return {delta.channels(), c.hidden};
    case Place::delta_z:
      return {delta.values(), c.hidden};
    case Place::delta_qkvz:
      return {delta.channels() + delta.values(), c.hidden};
    case Place::delta_b:
    case Place::delta_a:
      return {delta.value_heads, c.hidden};
    case Place::delta_ba:
      return {2 * std::int64_t{delta.value_heads}, c.hidden};
    case Place::delta_conv:
      return {delta.channels(), delta.kernel};
    case Place::delta_dt_bias:
    case Place::delta_decay:
      return {delta.value_heads};
    case Place::delta_norm:
      return {delta.value_dim};
    case Place::delta_out:
      return {c.hidden, delta.values()};
    case Place::router:
      return {e.count, c.hidden};
    case Place::router_bias:
    case Place::choice_bias:
      return {e.count};
    case Place::expert_gate:
    case Place::expert_up:
      return {e.count, e.width, c.hidden};
    case Place::expert_gate_up:
      return {e.count, 2 * e.width, c.hidden};
    case Place::expert_down:
      return {e.count, c.hidden, e.width};
    case Place::expert_gate_bias:
    case Place::expert_up_bias:
      return {e.count, e.width};
    case Place::expert_gate_up_bias:
      return {e.count, 2 * e.width};
    case Place::expert_down_bias:
      return {e.count, c.hidden};
  }
  LODE_ASSERT(false);
  return {};
}

std::vector<std::int64_t> head_row_order(const ModelConfig& c, bool pairs) {
  const std::int64_t d = c.head_dim, half = d / 2, turning = c.plan.rotary_dim > 0 ? c.plan.rotary_dim : d;
  if (!pairs && turning == d) return {};
  std::vector<std::int64_t> order(static_cast<std::size_t>(d));
  for (std::int64_t i = 0; i < half; ++i) {
    const bool turns = i < turning / 2;
    const std::int64_t rest =
        turning + i - turning / 2;  // dimensions that stand still follow those that turn
    const std::int64_t first = pairs ? 2 * i : turns ? i : rest;
    const std::int64_t second = pairs ? 2 * i + 1 : turns ? turning / 2 + i : rest + (d - turning) / 2;
    order[static_cast<std::size_t>(i)] = first;
    order[static_cast<std::size_t>(half + i)] = second;
  }
  return order;
}

}  // namespace lode
