// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"
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
  bool is_array(const char* key) const { return m_.is_array(prefix_ + key); }
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

const Family& read_family(const GgufMetadata& m) {
  const std::string_view name = m.text("general.architecture");
  if (const Family* const family = find_gguf_family(name)) return *family;
  std::vector<std::string_view> known;
  for (const Family& family : families())
    if (std::find(known.begin(), known.end(), family.gguf) == known.end()) known.push_back(family.gguf);
  throw InputError(fmt::format("{}: 'general.architecture': expected one of {}, found '{}'", m.where(),
                               fmt::join(known, ", "), excerpt(name)));
}

void add_shape(const GgufModel& model, const Keys& k, Json& json) {
  json["hidden_size"] = k.integer("embedding_length");
  json["num_hidden_layers"] = k.integer("block_count");
  json["intermediate_size"] = k.same("feed_forward_length");
  json["num_attention_heads"] = k.same("attention.head_count");
  if (k.has("attention.head_count_kv")) json["num_key_value_heads"] = k.same("attention.head_count_kv");
  json["max_position_embeddings"] = k.integer("context_length");
  json["rms_norm_eps"] = k.number("attention.layer_norm_rms_epsilon");
  if (k.has("attention.key_length")) {
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
  // Both of DeepSeek's factors; they cancel out where they are equal, as in all models that have them.
  if (k.has("rope.scaling.yarn_log_multiplier") && k.number("rope.scaling.yarn_log_multiplier") > 0)
    rope["mscale"] = rope["mscale_all_dim"] = k.number("rope.scaling.yarn_log_multiplier");
}

void add_rope(const GgufModel& model, const Keys& k, Json& json) {
  Json rope = {{"rope_type", "default"}};
  if (k.has("rope.freq_base")) rope["rope_theta"] = k.number("rope.freq_base");
  const std::int64_t d = json.contains("head_dim") ? json["head_dim"].get<std::int64_t>()
                                                   : json["hidden_size"].get<std::int64_t>() /
                                                         json["num_attention_heads"].get<std::int64_t>();
  if (k.has("rope.dimension_count") && k.integer("rope.dimension_count") != d)
    rope["partial_rotary_factor"] =
        static_cast<double>(k.integer("rope.dimension_count")) / static_cast<double>(d);
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

void add_multipliers(const Keys& k, Json& json) {
  for (const auto& [key, name] : {std::pair{"embedding_scale", "embedding_multiplier"},
                                  {"residual_scale", "residual_multiplier"},
                                  {"attention.scale", "attention_multiplier"},
                                  {"logit_scale", "logits_scaling"}})
    if (k.has(key)) json[name] = k.number(key);
}

/// Biases are there or not; nothing says so but the tensors.
void find_biases(const GgufModel& model, ModelPlan& p) {
  const auto has = [&](const char* name) {
    return model.tensors.contains(std::string("blk.0.") + name + ".bias");
  };
  p.q_bias = has("attn_q");
  p.k_bias = has("attn_k");
  p.v_bias = has("attn_v");
  p.o_bias = has("attn_output");
  p.gate_bias = has("ffn_gate");
  p.up_bias = has("ffn_up");
  p.down_bias = has("ffn_down");
}

}  // namespace

ModelConfig config_of_gguf(const GgufModel& model) {
  const GgufMetadata& m = model.metadata();
  const Family& family = read_family(m);
  const Keys k(m);
  if (k.has("expert_count") && k.integer("expert_count", 0) > 0)
    throw InputError(
        fmt::format("{}: 'expert_count': expected 0, found {}: mixtures of experts are not supported",
                    m.where(), k.integer("expert_count", 0)));
  Json json = {{"architectures", {family.architecture}}};
  add_shape(model, k, json);
  add_rope(model, k, json);
  if (k.has("attention.sliding_window") && k.integer("attention.sliding_window", 0) > 0)
    json["sliding_window"] = k.integer("attention.sliding_window");
  if (family.gguf == "gemma3") add_gemma(k, json);
  add_multipliers(k, json);
  if (m.has("tokenizer.ggml.bos_token_id"))
    json["bos_token_id"] = m.integer("tokenizer.ggml.bos_token_id", 0, kMost);
  if (m.has("tokenizer.ggml.tokens")) json["eos_token_id"] = end_tokens(m);
  ModelConfig config = config_of(json, m.where());
  find_biases(model, config.plan);
  return config;
}

}  // namespace lode
