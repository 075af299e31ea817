// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "model/family.h"
#include "text/gguf_tokenizer.h"

namespace lode {

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 30;  // config_of has the limits of each number
constexpr double kHuge = 1e15;

/// The metadata of one architecture, whose keys begin with its name.
class Keys {
 public:
  explicit Keys(const GgufMetadata& m) : m_(m), prefix_(std::string(m.text("general.architecture")) + ".") {}

  bool has(const char* key) const { return m_.has(prefix_ + key); }
  std::int64_t integer(const char* key, std::int64_t low = 1) const {
    return m_.integer(prefix_ + key, low, kMost);
  }
  double number(const char* key) const { return m_.number(prefix_ + key, -kHuge, kHuge); }
  std::string text(const char* key) const { return std::string(m_.text(prefix_ + key)); }
  std::vector<std::int64_t> list(const char* key) const { return m_.integers(prefix_ + key, 0, kMost); }
  bool is_array(const char* key) const { return m_.is_array(prefix_ + key); }
  /// A number for each of so many layers, which may be written once for all of them.
  std::vector<std::int64_t> by_layer(const char* key, std::int64_t layers, std::int64_t low = 1) const {
    std::vector<std::int64_t> numbers = m_.integers(prefix_ + key, low, kMost);
    if (!is_array(key)) numbers.resize(static_cast<std::size_t>(layers), numbers.front());
    if (std::ssize(numbers) != layers)
      throw InputError(fmt::format("{}: metadata '{}{}': expected a number for each of {} layers, found {}",
                                   m_.where(), prefix_, key, layers, numbers.size()));
    return numbers;
  }
  /// A number that may be written once for each layer, all alike.
  std::int64_t same(const char* key) const {
    const auto numbers = m_.integers(prefix_ + key, 1, kMost);
    if (numbers.empty() || std::count(numbers.begin(), numbers.end(), numbers[0]) != std::ssize(numbers))
      throw InputError(fmt::format("{}: metadata '{}{}': expected one number for all layers, found several",
                                   m_.where(), prefix_, key));
    return numbers[0];
  }
  const std::string& where() const { return m_.where(); }

 private:
  const GgufMetadata& m_;
  std::string prefix_;
};

bool has_experts(const Keys& k) {
  return k.has("expert_count") && k.integer("expert_count", 0) > 0;
}

const Family& read_family(const GgufMetadata& m, const Keys& k) {
  const std::string_view name = m.text("general.architecture");
  if (const Family* const family = find_gguf_family(name, has_experts(k))) {
    if (has_experts(k) && !family->experts && !family->experts_too)
      throw UnreadableError(fmt::format("{}: 'expert_count': expected 0 in this architecture, found {}",
                                        m.where(), k.integer("expert_count")));
    return *family;
  }
  std::vector<std::string_view> known;
  for (const Family& family : families())
    if (std::find(known.begin(), known.end(), family.gguf) == known.end()) known.push_back(family.gguf);
  throw UnreadableError(fmt::format("{}: 'general.architecture': expected one of {}, found '{}'", m.where(),
                                    fmt::join(known, ", "), excerpt(name)));
}

/// Attention over latent rows: the heads of the file are the rows'.
void add_latent(const Keys& k, Json& json) {
  const std::int64_t turning = k.integer("rope.dimension_count");
  json["num_key_value_heads"] = json["num_attention_heads"];
  json["kv_lora_rank"] = k.integer("attention.kv_lora_rank");
  if (k.has("attention.q_lora_rank")) json["q_lora_rank"] = k.integer("attention.q_lora_rank");
  json["qk_rope_head_dim"] = turning;
  json["qk_nope_head_dim"] = k.integer("attention.key_length_mla") - turning;
  json["v_head_dim"] = k.integer("attention.value_length_mla");
  json["head_dim"] = turning;  // nothing else turns
}

/// Experts beside one that all tokens go through, behind some dense layers.
void add_shared_experts(const GgufModel& model, const Keys& k, Json& json) {
  json["num_nextn_predict_layers"] = json["mtp_num_hidden_layers"];
  if (k.has("leading_dense_block_count"))
    json["first_k_dense_replace"] = k.integer("leading_dense_block_count", 0);
  if (k.has("expert_shared_count")) json["n_shared_experts"] = k.integer("expert_shared_count", 0);
  for (const auto& [key, name] :
       {std::pair{"expert_group_count", "n_group"}, {"expert_group_used_count", "topk_group"}})
    if (k.has(key)) json[name] = k.integer(key);
  if (k.has("expert_weights_scale")) json["routed_scaling_factor"] = k.number("expert_weights_scale");
  // Files that do not say it are DeepSeek-V2's, or GLM-4.7 Flash's, whose choice has a bias, as with sigmoids alone.
  constexpr std::int64_t kSigmoid = 2;
  const bool biased = std::ranges::any_of(
      model.tensors, [](const auto& tensor) { return tensor.first.ends_with(".exp_probs_b.bias"); });
  const bool sigmoid = k.has("expert_gating_func") ? k.integer("expert_gating_func", 0) == kSigmoid : biased;
  json["scoring_func"] = sigmoid ? "sigmoid" : "softmax";
  json["norm_topk_prob"] = k.has("expert_weights_norm") && k.integer("expert_weights_norm", 0) != 0;
}

void add_shape(const GgufModel& model, const Keys& k, bool differs_by_layer, Json& json) {
  json["hidden_size"] = k.integer("embedding_length");
  const std::int64_t drafting = k.has("nextn_predict_layers") ? k.integer("nextn_predict_layers", 0) : 0;
  json["num_hidden_layers"] = k.integer("block_count") - drafting;
  json["mtp_num_hidden_layers"] = drafting;
  // Where layers differ the family reads them all; the first one's stand here.
  const auto layers = json["num_hidden_layers"].get<std::int64_t>();
  const auto first = [&](const char* key) {
    return differs_by_layer ? k.by_layer(key, layers).front() : k.same(key);
  };
  json["intermediate_size"] =
      first(k.has("feed_forward_length") ? "feed_forward_length" : "expert_feed_forward_length");
  json["num_attention_heads"] = k.same("attention.head_count");
  if (k.has("attention.head_count_kv")) json["num_key_value_heads"] = first("attention.head_count_kv");
  json["max_position_embeddings"] = k.integer("context_length");
  json["rms_norm_eps"] = k.number("attention.layer_norm_rms_epsilon");
  if (k.has("attention.kv_lora_rank")) {
    add_latent(k, json);
  } else if (k.has("attention.key_length")) {
    json["head_dim"] = k.integer("attention.key_length");
    if (k.has("attention.value_length") && k.integer("attention.value_length") != json["head_dim"])
      throw InputError(fmt::format("{}: 'attention.value_length': expected {}, as keys have, found {}",
                                   k.where(), json["head_dim"].dump(), k.integer("attention.value_length")));
  }
  const auto embedding = model.tensors.find("token_embd.weight");
  if (embedding == model.tensors.end())
    throw InputError(k.where() + ": expected a tensor 'token_embd.weight', found none");
  json["vocab_size"] = embedding->second.shape.front();
  json["tie_word_embeddings"] = !model.tensors.contains("output.weight");
}

/// The numbers of a float32 vector.
Json vector_json(const GgufModel& model, const char* name, const std::string& where) {
  const auto found = model.tensors.find(name);
  if (found == model.tensors.end())
    throw InputError(fmt::format("{}: expected a tensor '{}', found none", where, name));
  const GgufTensor& tensor = found->second;
  if (tensor.type != WeightType::f32 || tensor.shape.size() != 1)
    throw InputError(fmt::format("{}: tensor '{}': expected a vector in F32, found {} of {} dimensions",
                                 where, name, name_of(tensor.type), tensor.shape.size()));
  std::vector<float> numbers(tensor.bytes.size() / sizeof(float));
  std::memcpy(numbers.data(), tensor.bytes.data(), tensor.bytes.size());
  return numbers;
}

void add_yarn(const Keys& k, Json& rope) {
  rope["rope_type"] = "yarn";
  for (const auto& [key, name] :
       {std::pair{"rope.scaling.yarn_beta_fast", "beta_fast"}, {"rope.scaling.yarn_beta_slow", "beta_slow"}})
    if (k.has(key)) rope[name] = k.number(key);
  // Both of DeepSeek's factors; they cancel out where they are equal, as in all models that have them. Files of
  // DeepSeek's own models hold a tenth.
  const double tenth = k.has("attention.kv_lora_rank") ? 10.0 : 1.0;
  if (k.has("rope.scaling.yarn_log_multiplier") && k.number("rope.scaling.yarn_log_multiplier") > 0)
    rope["mscale"] = rope["mscale_all_dim"] = tenth * k.number("rope.scaling.yarn_log_multiplier");
}

void add_rope(const GgufModel& model, const Keys& k, Json& json) {
  Json rope = {{"rope_type", "default"}};
  if (k.has("rope.freq_base")) rope["rope_theta"] = k.number("rope.freq_base");
  const std::int64_t d = json.contains("head_dim") ? json["head_dim"].get<std::int64_t>()
                                                   : json["hidden_size"].get<std::int64_t>() /
                                                         json["num_attention_heads"].get<std::int64_t>();
  const std::int64_t turning = k.has("rope.dimension_count") ? k.integer("rope.dimension_count") : d;
  rope["partial_rotary_factor"] = static_cast<double>(turning) / static_cast<double>(d);
  const std::string type = k.has("rope.scaling.type") ? k.text("rope.scaling.type") : "none";
  if (k.has("rope.scaling.original_context_length"))
    rope["original_max_position_embeddings"] = k.integer("rope.scaling.original_context_length");
  if (k.has("rope.scaling.factor")) rope["factor"] = k.number("rope.scaling.factor");
  if (model.tensors.contains("rope_freqs.weight")) {
    rope["rope_type"] = "divisors";
    rope["divisors"] = vector_json(model, "rope_freqs.weight", k.where());
  } else if (model.tensors.contains("rope_factors_long.weight")) {
    rope["rope_type"] = "longrope";
    rope["long_factor"] = vector_json(model, "rope_factors_long.weight", k.where());
    rope["short_factor"] = vector_json(model, "rope_factors_short.weight", k.where());
    if (k.has("rope.scaling.attn_factor")) rope["attention_factor"] = k.number("rope.scaling.attn_factor");
    rope.erase("factor");
  } else if (type == "yarn") {
    add_yarn(k, rope);
  } else if (type == "linear") {
    rope["rope_type"] = "linear";
  } else if (type != "none") {
    throw InputError(
        fmt::format("{}: 'rope.scaling.type': expected none, linear, yarn or longrope, found '{}'", k.where(),
                    excerpt(type)));
  }
  if (k.is_array("rope.dimension_sections")) rope["mrope_section"] = k.list("rope.dimension_sections");
  if (k.has("attention.temperature_scale"))
    rope["llama_4_scaling_beta"] = k.number("attention.temperature_scale");
  json["rope_parameters"] = std::move(rope);
}

void add_gemma(const Keys& k, Json& json) {
  json["norm_plus_one"] = false;
  // Known by its number of layers, as in the readers that these files are made for.
  constexpr std::int64_t kLargest = 62;
  const Json& d = json.contains("head_dim") ? json["head_dim"] : Json(256);
  json["query_pre_attn_scalar"] =
      json["num_hidden_layers"] == kLargest
          ? Json(json["hidden_size"].get<std::int64_t>() / json["num_attention_heads"].get<std::int64_t>())
          : d;
  if (k.has("rope.freq_base_swa")) json["rope_local_base_freq"] = k.number("rope.freq_base_swa");
  if (k.has("attention.sliding_window_pattern") && !k.is_array("attention.sliding_window_pattern"))
    json["sliding_window_pattern"] = k.integer("attention.sliding_window_pattern");
  if (k.has("final_logit_softcapping")) json["final_logit_softcapping"] = k.number("final_logit_softcapping");
}

/// Sizes that layers with a window and layers without have apart, and layers that are given numbers of their own.
void add_gemma4(const GgufModel& model, const Keys& k, Json& json) {
  const auto layers = json["num_hidden_layers"].get<std::int64_t>();
  const auto windowed = k.by_layer("attention.sliding_window_pattern", layers, 0);
  const auto heads = k.by_layer("attention.head_count_kv", layers);
  const auto widths = k.by_layer("feed_forward_length", layers);
  const std::int64_t shared =
      k.has("attention.shared_kv_layers") ? k.integer("attention.shared_kv_layers", 0) : 0;
  json["num_kv_shared_layers"] = shared;
  json["global_head_dim"] = json["head_dim"];
  json["head_dim"] = k.integer("attention.key_length_swa");
  json["layer_types"] = Json::array();
  bool value_is_key = false;
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool window = windowed[static_cast<std::size_t>(i)] != 0;
    json["layer_types"].push_back(window ? "sliding_attention" : "full_attention");
    json[window ? "num_key_value_heads" : "num_global_key_value_heads"] = heads[static_cast<std::size_t>(i)];
    if (!window && i < layers - shared)
      value_is_key = !model.tensors.contains(fmt::format("blk.{}.attn_v.weight", i));
  }
  json["attention_k_eq_v"] = value_is_key;
  json["use_double_wide_mlp"] = widths.back() > widths.front();
  json["hidden_size_per_layer_input"] =
      k.has("embedding_length_per_layer_input") ? k.integer("embedding_length_per_layer_input", 0) : 0;
  if (const auto found = model.tensors.find("per_layer_token_embd.weight"); found != model.tensors.end())
    json["vocab_size_per_layer_input"] = found->second.shape.front();
  if (k.has("rope.freq_base_swa")) json["rope_local_base_freq"] = k.number("rope.freq_base_swa");
  if (k.has("final_logit_softcapping")) json["final_logit_softcapping"] = k.number("final_logit_softcapping");
  json["enable_moe_block"] = has_experts(k);
}

/// Keys that state space models have too are the recurrent layers'.
void add_hybrid(const Keys& k, Json& json) {
  json["norm_plus_one"] = false;
  json["linear_decay_log"] = false;
  json["linear_conv_kernel_dim"] = k.integer("ssm.conv_kernel");
  json["linear_key_head_dim"] = k.integer("ssm.state_size");
  json["linear_num_key_heads"] = k.integer("ssm.group_count");
  json["linear_num_value_heads"] = k.integer("ssm.time_step_rank");
  json["linear_value_head_dim"] = k.integer("ssm.inner_size") / k.integer("ssm.time_step_rank");
  if (k.has("full_attention_interval"))
    json["full_attention_interval"] = k.integer("full_attention_interval");
  if (k.is_array("attention.recurrent_layers")) {  // with those that draft
    const std::int64_t layers = json["num_hidden_layers"].get<std::int64_t>();
    const auto recurrent = k.by_layer("attention.recurrent_layers",
                                      layers + json["mtp_num_hidden_layers"].get<std::int64_t>(), 0);
    json["layer_types"] = Json::array();
    for (std::int64_t i = 0; i < layers; ++i)
      json["layer_types"].push_back(recurrent[static_cast<std::size_t>(i)] != 0 ? "linear_attention"
                                                                                : "full_attention");
  }
  if (k.has("expert_shared_feed_forward_length"))
    json["shared_expert_intermediate_size"] = k.integer("expert_shared_feed_forward_length");
}

void add_multipliers(const Keys& k, Json& json) {
  for (const auto& [key, name] : {std::pair{"embedding_scale", "embedding_multiplier"},
                                  {"residual_scale", "residual_multiplier"},
                                  {"attention.scale", "attention_multiplier"},
                                  {"logit_scale", "logits_scaling"}})
    if (k.has(key)) json[name] = k.number(key);
}

/// The same count under each of the names that families have for it.
void add_experts(const GgufModel& model, const Keys& k, Json& json) {
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"})
    json[name] = k.integer("expert_count");
  json["num_experts_per_tok"] = k.integer("expert_used_count");
  if (k.has("expert_feed_forward_length"))
    json["moe_intermediate_size"] = k.integer("expert_feed_forward_length");
  if (!json.contains("norm_topk_prob"))
    json["norm_topk_prob"] = k.has("expert_weights_norm") ? k.integer("expert_weights_norm", 0) != 0 : true;
  Json dense = Json::array();
  for (std::int64_t i = 0; i < json["num_hidden_layers"].get<std::int64_t>(); ++i)
    if (!model.tensors.contains(fmt::format("blk.{}.ffn_gate_inp.weight", i))) dense.push_back(i);
  json["mlp_only_layers"] = std::move(dense);
}

/// Biases are there or not; nothing says so but the tensors.
void find_biases(const GgufModel& model, ModelPlan& p) {
  const auto has = [&](const char* name) {
    return model.tensors.contains(std::string("blk.0.") + name + ".bias");
  };
  const bool joined = has("attn_qkv");
  p.q_bias = joined || has("attn_q");
  p.k_bias = joined || has("attn_k");
  p.v_bias = joined || has("attn_v");
  p.o_bias = has("attn_output");
  p.gate_bias = has("ffn_gate");
  p.up_bias = has("ffn_up");
  p.down_bias = has("ffn_down");
}

}  // namespace

ModelConfig config_of_gguf(const GgufModel& model) {
  const GgufMetadata& m = model.metadata();
  const Keys k(m);
  const Family& family = read_family(m, k);
  Json json = {{"architectures", {family.architecture}}};
  add_shape(model, k, family.gguf == "gemma4", json);
  add_rope(model, k, json);
  if (k.has("attention.sliding_window") && k.integer("attention.sliding_window", 0) > 0)
    json["sliding_window"] = k.integer("attention.sliding_window");
  if (family.gguf == "deepseek2" || family.gguf == "glm4moe") add_shared_experts(model, k, json);
  if (family.gguf == "glm4moe") json["use_qk_norm"] = model.tensors.contains("blk.0.attn_q_norm.weight");
  if (family.gguf == "gemma3") add_gemma(k, json);
  if (family.gguf == "gemma4") add_gemma4(model, k, json);
  if (k.has("ssm.conv_kernel")) {
    add_hybrid(k, json);
    json["linear_heads_tiled"] = family.gguf != "qwen3next";
  }
  if (has_experts(k)) add_experts(model, k, json);
  if (family.gguf == "gpt-oss") json["rope_parameters"]["truncate"] = false;  // no key says so
  add_multipliers(k, json);
  if (m.has("tokenizer.ggml.bos_token_id"))
    json["bos_token_id"] = m.integer("tokenizer.ggml.bos_token_id", 0, kMost);
  if (m.has("tokenizer.ggml.tokens")) json["eos_token_id"] = end_tokens(m);
  ModelConfig config = config_of(json, m.where());
  find_biases(model, config.plan);
  return config;
}

}  // namespace lode
