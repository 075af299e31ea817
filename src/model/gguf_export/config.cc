// SPDX-License-Identifier: Apache-2.0
// The metadata of a GGUF file that say a model's sizes and plan; gguf_config.cc reads them back.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/rope.h"
#include "model/gguf_export/parts.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

/// Adds keys that begin with the architecture's name.
class Keys {
 public:
  Keys(const ModelConfig& c, GgufWriter& to) : prefix_(std::string(family_of(c).gguf) + "."), to_(to) {}

  void whole(const char* key, std::int64_t value) {
    to_.add_u32(prefix_ + key, static_cast<std::uint32_t>(value));
  }
  void number(const char* key, double value) { to_.add_f32(prefix_ + key, static_cast<float>(value)); }
  void flag(const char* key, bool value) { to_.add(prefix_ + key, value); }
  void text(const char* key, std::string_view value) { to_.add(prefix_ + key, value); }
  void flags(const char* key, const std::vector<bool>& values) { to_.add_bools(prefix_ + key, values); }
  /// The fourth is of no model that we read.
  void sections(const std::array<int, 3>& of) {
    to_.add_i32s(prefix_ + "rope.dimension_sections", std::array<std::int32_t, 4>{of[0], of[1], of[2], 0});
  }
  /// One number for each layer; all alike: one.
  void by_layer(const char* key, const std::vector<std::int32_t>& values) {
    if (std::ranges::count(values, values.front()) == std::ssize(values)) return whole(key, values.front());
    to_.add_i32s(prefix_ + key, values);
  }

 private:
  std::string prefix_;
  GgufWriter& to_;
};

template <class Value>
auto of_layers(const ModelConfig& c, const Value& value) {
  std::vector<decltype(value(0))> all;
  for (int i = 0; i < c.layers; ++i) all.push_back(value(i));
  return all;
}

/// The first layer of a kind; the number of layers if there is none.
template <class Is>
int first_layer(const ModelConfig& c, const Is& is) {
  int i = 0;
  while (i < c.layers && !is(c.plan.layer(i))) ++i;
  return i;
}

bool is_windowed(const LayerPlan& layer) {
  return layer.window > 0;
}

void add_yarn(const ModelConfig& c, Keys& keys) {
  const RopeScaling& s = c.rope_scaling;
  keys.whole("rope.scaling.original_context_length", s.original_max_positions);
  keys.number("rope.scaling.yarn_beta_fast", s.beta_fast);
  keys.number("rope.scaling.yarn_beta_slow", s.beta_slow);
  const double part = c.plan.latent.kv_rank > 0 ? 0.1 : 1.0;  // files of latent rows hold a tenth
  if (s.mscale_all_dim > 0) keys.number("rope.scaling.yarn_log_multiplier", part * s.mscale_all_dim);
}

void add_rope(const ModelConfig& c, Keys& keys) {
  using enum RopeScaling::Kind;
  const RopeScaling& s = c.rope_scaling;
  keys.number("rope.freq_base", c.rope_theta);
  keys.whole("rope.dimension_count", c.plan.rotary_dim > 0 ? c.plan.rotary_dim : c.head_dim);
  if (c.plan.local_theta > 0) keys.number("rope.freq_base_swa", c.plan.local_theta);
  if (c.plan.rope_sections != std::array<int, 3>{}) keys.sections(c.plan.rope_sections);
  if (c.plan.query_growth > 0) keys.number("attention.temperature_scale", c.plan.query_growth);
  if (s.kind == longrope) {
    keys.whole("rope.scaling.original_context_length", s.original_max_positions);
    keys.number("rope.scaling.attn_factor", Rope(c, c.max_positions).attention_scaling());
  }
  if (s.kind != linear && s.kind != yarn) return;
  keys.text("rope.scaling.type", name_of(s.kind));
  keys.number("rope.scaling.factor", s.factor);
  if (s.kind == yarn) add_yarn(c, keys);
}

/// Attention over latent rows; to other programs it has one head, whose keys are the rows.
void add_latent(const ModelConfig& c, Keys& keys) {
  const LatentPlan& p = c.plan.latent;
  keys.whole("attention.head_count_kv", 1);
  keys.whole("attention.key_length", p.row());
  keys.whole("attention.value_length", p.kv_rank);
  keys.whole("attention.kv_lora_rank", p.kv_rank);
  if (p.q_rank > 0) keys.whole("attention.q_lora_rank", p.q_rank);
  keys.whole("attention.key_length_mla", p.nope + p.rope);
  keys.whole("attention.value_length_mla", p.value);
}

void add_heads(const ModelConfig& c, Keys& keys) {
  keys.whole("attention.head_count", c.query_heads);
  if (c.plan.latent.kv_rank > 0) return add_latent(c, keys);
  keys.by_layer("attention.head_count_kv", of_layers(c, [&](int i) { return c.kv_heads_of(i); }));
  keys.whole("attention.key_length", c.head_dim);
  keys.whole("attention.value_length", c.head_dim);
}

/// Experts beside one that all tokens go through, behind some dense layers.
void add_shared_experts(const ModelConfig& c, Keys& keys) {
  const ExpertPlan& e = c.plan.experts;
  const int dense = first_layer(c, [](const LayerPlan& layer) { return layer.experts; });
  keys.whole("leading_dense_block_count", dense);
  if (e.count == 0) return;
  keys.whole("expert_shared_count", dense < c.layers ? feed_forward_width(c, dense) / e.width : 0);
  keys.number("expert_weights_scale", e.scale);
  keys.whole("expert_gating_func", e.score == ExpertPlan::Score::sigmoid ? 2 : 1);
  if (e.groups == 1 && e.score == ExpertPlan::Score::softmax) return;
  keys.whole("expert_group_count", e.groups);
  keys.whole("expert_group_used_count", e.groups_used);
}

void add_experts(const ModelConfig& c, Keys& keys) {
  const ExpertPlan& e = c.plan.experts;
  if (e.count == 0) return;
  keys.whole("expert_count", e.count);
  keys.whole("expert_used_count", e.used);
  keys.whole("expert_feed_forward_length", e.width);
  if (!e.score_chosen) keys.flag("expert_weights_norm", e.normalise);
}

/// Recurrent layers, under the keys of state space models.
void add_hybrid(const ModelConfig& c, Keys& keys) {
  const DeltaPlan& d = c.plan.delta;
  keys.whole("ssm.conv_kernel", d.kernel);
  keys.whole("ssm.state_size", d.key_dim);
  keys.whole("ssm.group_count", d.key_heads);
  keys.whole("ssm.time_step_rank", d.value_heads);
  keys.whole("ssm.inner_size", d.values());
  keys.whole("full_attention_interval",
             1 + first_layer(c, [](const LayerPlan& layer) { return !layer.recurrent; }));
  if (c.plan.experts.count > 0) keys.whole("expert_shared_feed_forward_length", feed_forward_width(c, 0));
}

void add_windows(const ModelConfig& c, Keys& keys) {
  const int first = first_layer(c, is_windowed);
  if (first == c.layers) return;
  keys.whole("attention.sliding_window", c.plan.layer(first).window);
  constexpr int kUsualPeriod = 6;
  const int period = 1 + first_layer(c, [](const LayerPlan& layer) { return !is_windowed(layer); });
  if (family_of(c).gguf == "gemma3" && period != kUsualPeriod)
    keys.whole("attention.sliding_window_pattern", period);
}

/// Layers with a window and layers without have heads of different sizes; the last ones may have no rows of their own.
void add_gemma4(const ModelConfig& c, Keys& keys) {
  const int windowed = first_layer(c, is_windowed),
            shared = first_layer(c, [](const LayerPlan&layer) { return !layer.own_rows(); });
  const int d = windowed < c.layers ? c.head_dim_of(windowed) : c.head_dim;
  for (const char* key :
       {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"})
    keys.whole(key, d);
  keys.flags("attention.sliding_window_pattern",
             of_layers(c, [&](int i) { return is_windowed(c.plan.layer(i)); }));
  keys.whole("attention.shared_kv_layers", c.layers - shared);
  keys.whole("embedding_length_per_layer_input", c.plan.inputs.width);
}

void add_multipliers(const ModelConfig& c, Keys& keys) {
  const ModelPlan& p = c.plan;
  if (p.logit_cap > 0) keys.number("final_logit_softcapping", p.logit_cap);
  if (family_of(c).name != "Granite") return;
  keys.number("embedding_scale", p.embedding_multiplier);
  keys.number("residual_scale", p.residual_multiplier);
  keys.number("attention.scale", p.score_scale);
  keys.number("logit_scale", p.logit_divisor);
}

/// What the frequencies of a file that knows no such scaling are divided by.
std::vector<float> divisors_of(const ModelConfig& c) {
  constexpr float kStill = 1e30f;  // pairs that do not turn
  RopeShape plain = c;
  plain.scaling = {};
  const Rope scaled(c, c.max_positions), usual(plain, c.max_positions);
  std::vector<float> divisors;
  for (std::size_t i = 0; i < usual.turning_pairs(); ++i)
    divisors.push_back(i < scaled.turning_pairs() ? usual.frequencies()[i] / scaled.frequencies()[i]
                                                  : kStill);
  return divisors;
}

}  // namespace

std::vector<RopeVector> rope_vectors(const ModelConfig& c) {
  using enum RopeScaling::Kind;
  const RopeScaling& s = c.rope_scaling;
  if (s.kind == llama3 || s.kind == proportional) return {{"rope_freqs.weight", divisors_of(c)}};
  if (s.kind != longrope) return {};
  return {{"rope_factors_long.weight", s.long_divisors}, {"rope_factors_short.weight", s.short_divisors}};
}

void add_gguf_config(const ModelConfig& c, const std::string& name, GgufWriter& to) {
  const std::string_view architecture = family_of(c).gguf;
  Keys keys(c, to);
  to.add("general.architecture", architecture);
  to.add("general.type", std::string_view("model"));
  to.add("general.name", name);
  to.add_u32("general.quantization_version", 2);
  keys.whole("block_count", c.layers);
  keys.whole("context_length", c.max_positions);
  keys.whole("embedding_length", c.hidden);
  if (architecture == "gemma4")
    keys.by_layer("feed_forward_length",
                  of_layers(c, [&](int i) { return static_cast<std::int32_t>(feed_forward_width(c, i)); }));
  else
    keys.whole("feed_forward_length", c.intermediate);
  add_heads(c, keys);
  keys.whole("vocab_size", c.vocab);
  keys.number("attention.layer_norm_rms_epsilon", c.norm_eps);
  add_rope(c, keys);
  add_experts(c, keys);
  if (architecture == "deepseek2" || architecture == "glm4moe") add_shared_experts(c, keys);
  if (architecture == "phi3" || architecture == "gpt-oss" || architecture.starts_with("gemma"))
    add_windows(c, keys);
  if (architecture == "gemma4") add_gemma4(c, keys);
  if (c.plan.delta.key_heads > 0) add_hybrid(c, keys);
  add_multipliers(c, keys);
}

}  // namespace lode
