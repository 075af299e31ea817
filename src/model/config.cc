// SPDX-License-Identifier: Apache-2.0
#include "model/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxWidth = 1 << 20, kMaxVocab = 4 << 20;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 30;
constexpr double kHuge = 1e15;
constexpr double kLeastTheta = 2.0;  // YaRN divides by its logarithm

std::string optional_string(const Json& json, const char* key, const std::string& fallback,
                            std::string_view where) {
  return json_has(json, key) ? json_string(json, key, where) : fallback;
}
std::int64_t optional_int(const Json& json, const char* key, std::int64_t fallback, std::string_view where,
                          std::int64_t low, std::int64_t high) {
  return json_has(json, key) ? json_int(json, key, where, low, high) : fallback;
}
double optional_number(const Json& json, const char* key, double fallback, std::string_view where, double low,
                       double high) {
  return json_has(json, key) ? json_number(json, key, where, low, high) : fallback;
}
bool optional_bool(const Json& json, const char* key, bool fallback, std::string_view where) {
  return json_has(json, key) ? json_bool(json, key, where) : fallback;
}

std::string read_architecture(const Json& json, std::string_view where) {
  constexpr std::string_view kKnown = "LlamaForCausalLM, MistralForCausalLM";
  if (!json_has(json, "architectures") || !json["architectures"].is_array() ||
      json["architectures"].size() != 1 || !json["architectures"][0].is_string()) {
    throw InputError(fmt::format("{}: 'architectures': expected one of {}, found none", where, kKnown));
  }
  const std::string name = json["architectures"][0].get<std::string>();
  if (name != "LlamaForCausalLM" && name != "MistralForCausalLM") {
    throw InputError(
        fmt::format("{}: 'architectures': expected one of {}, found '{}'", where, kKnown, excerpt(name)));
  }
  return name;
}

constexpr std::array<std::pair<std::string_view, RopeScaling::Kind>, 5> kKinds = {
    {{"default", RopeScaling::Kind::none},
     {"linear", RopeScaling::Kind::linear},
     {"dynamic", RopeScaling::Kind::dynamic},
     {"yarn", RopeScaling::Kind::yarn},
     {"llama3", RopeScaling::Kind::llama3}}};

RopeScaling::Kind scaling_kind(const std::string& name, std::string_view where) {
  for (const auto& [known, kind] : kKinds) {
    if (known == name) return kind;
  }
  throw InputError(
      fmt::format("{}: RoPE scaling: expected default, linear, dynamic, yarn or llama3, found '{}'", where,
                  excerpt(name)));
}

/// `json` is rope_scaling (transformers 4: "type" or "rope_type") or rope_parameters (transformers 5).
RopeScaling read_scaling(const Json& json, const ModelConfig& config, std::string_view where) {
  RopeScaling s;
  if (!json.is_object())
    throw InputError(fmt::format("{}: RoPE scaling: expected an object, found {}", where, json.type_name()));
  s.kind = scaling_kind(json_string(json, json_has(json, "rope_type") ? "rope_type" : "type", where), where);
  if (s.kind == RopeScaling::Kind::none) return s;
  s.factor = json_number(json, "factor", where, 1e-6, kHuge);
  const bool needs_original = s.kind == RopeScaling::Kind::llama3;
  s.original_max_positions = needs_original
                                 ? json_int(json, "original_max_position_embeddings", where, 1, kMaxPositions)
                                 : optional_int(json, "original_max_position_embeddings",
                                                config.max_positions, where, 1, kMaxPositions);
  if (needs_original) {
    s.low_freq_factor = json_number(json, "low_freq_factor", where, 1e-6, kHuge);
    s.high_freq_factor = json_number(json, "high_freq_factor", where, 1e-6, kHuge);
    if (s.low_freq_factor >= s.high_freq_factor) {
      throw InputError(fmt::format("{}: expected 'low_freq_factor' below 'high_freq_factor', found {} and {}",
                                   where, s.low_freq_factor, s.high_freq_factor));
    }
  }
  s.beta_fast = optional_number(json, "beta_fast", 32.0, where, 1e-6, kHuge);
  s.beta_slow = optional_number(json, "beta_slow", 1.0, where, 1e-6, kHuge);
  s.attention_factor = optional_number(json, "attention_factor", 0.0, where, 1e-6, 1e6);
  s.mscale = optional_number(json, "mscale", 0.0, where, 0.0, 1e6);
  s.mscale_all_dim = optional_number(json, "mscale_all_dim", 0.0, where, 0.0, 1e6);
  s.truncate = optional_bool(json, "truncate", true, where);
  return s;
}

void refuse_partial_rotation(const Json& json, std::string_view where) {
  if (optional_number(json, "partial_rotary_factor", 1.0, where, 0.0, 1.0) == 1.0) return;
  throw InputError(fmt::format(
      "{}: 'partial_rotary_factor': expected 1, found another: partial RoPE is not supported", where));
}

void read_rope(const Json& json, ModelConfig& config, std::string_view where) {
  config.rope_theta = optional_number(json, "rope_theta", 10000.0, where, kLeastTheta, kHuge);
  if (json_has(json, "rope_parameters")) {
    const Json& rope = json["rope_parameters"];
    config.rope_theta = optional_number(rope, "rope_theta", config.rope_theta, where, kLeastTheta, kHuge);
    config.rope_scaling = read_scaling(rope, config, where);
    refuse_partial_rotation(rope, where);
  } else if (json_has(json, "rope_scaling")) {
    config.rope_scaling = read_scaling(json["rope_scaling"], config, where);
  }
  refuse_partial_rotation(json, where);
}

/// An id or a list of ids of the vocabulary; absent and null give none.
std::vector<TokenId> read_ids(const Json& json, const char* key, std::int64_t vocab, std::string_view where) {
  std::vector<TokenId> ids;
  if (!json_has(json, key)) return ids;
  const Json list = json[key].is_array() ? json[key] : Json::array({json[key]});
  for (const Json& id : list)
    ids.push_back(static_cast<TokenId>(json_int({{key, id}}, key, where, 0, vocab - 1)));
  return ids;
}

void read_shape(const Json& json, ModelConfig& c, std::string_view where) {
  c.hidden = json_int(json, "hidden_size", where, 1, kMaxWidth);
  c.intermediate = json_int(json, "intermediate_size", where, 1, kMaxWidth);
  c.layers = static_cast<int>(json_int(json, "num_hidden_layers", where, 1, kMaxLayers));
  c.query_heads = static_cast<int>(json_int(json, "num_attention_heads", where, 1, kMaxHeads));
  c.kv_heads =
      static_cast<int>(optional_int(json, "num_key_value_heads", c.query_heads, where, 1, kMaxHeads));
  c.vocab = json_int(json, "vocab_size", where, 1, kMaxVocab);
  c.max_positions = json_int(json, "max_position_embeddings", where, 1, kMaxPositions);
  c.head_dim =
      static_cast<int>(optional_int(json, "head_dim", c.hidden / c.query_heads, where, 1, kMaxHeadDim));
  if (!json_has(json, "head_dim") && c.hidden % c.query_heads != 0) {
    throw InputError(
        fmt::format("{}: expected 'head_dim', or a 'hidden_size' that is a multiple of "
                    "'num_attention_heads', found {} and {}",
                    where, c.hidden, c.query_heads));
  }
  if (c.query_heads % c.kv_heads != 0 || c.query_heads / c.kv_heads > 16) {
    throw InputError(fmt::format(
        "{}: expected 'num_attention_heads' to be 1 to 16 times 'num_key_value_heads', found {} and {}",
        where, c.query_heads, c.kv_heads));
  }
  if (c.head_dim < 4 || c.head_dim % 2 != 0) {
    throw InputError(
        fmt::format("{}: expected an even head dimension of 4 or more, found {}", where, c.head_dim));
  }
}

/// "L32q32kv8d128": layers, query heads, KV heads, head dimension.
bool parse_spelled_shape(std::string_view name, std::array<int, 4>& numbers) {
  constexpr std::array<std::string_view, 4> kMarks = {"L", "q", "kv", "d"};
  for (std::size_t i = 0; i < kMarks.size(); ++i) {
    if (!name.starts_with(kMarks[i])) return false;
    name.remove_prefix(kMarks[i].size());
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), numbers[i]);
    if (error != std::errc() || numbers[i] < 1 || numbers[i] > kMaxHeads) return false;
    name.remove_prefix(static_cast<std::size_t>(end - name.data()));
  }
  return name.empty() && numbers[1] % numbers[2] == 0 && numbers[1] / numbers[2] <= 16 &&
         numbers[3] % 2 == 0 && numbers[3] <= kMaxHeadDim;
}

ModelConfig shape(int layers, int query_heads, int kv_heads, int head_dim, std::int64_t intermediate,
                  std::int64_t vocab) {
  ModelConfig c;
  c.architecture = "LlamaForCausalLM";
  c.hidden = std::int64_t{query_heads} * head_dim;
  c.intermediate = intermediate;
  c.layers = layers;
  c.query_heads = query_heads;
  c.kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.vocab = vocab;
  c.max_positions = 1 << 20;
  c.rope_theta = 500000.0;
  return c;
}

}  // namespace

std::string_view name_of(RopeScaling::Kind kind) {
  return std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& k) { return k.second == kind; })->first;
}

ModelConfig parse_config(std::string_view text, std::string_view where) {
  const Json json = parse_json(text, where);
  ModelConfig c;
  c.architecture = read_architecture(json, where);
  if (optional_string(json, "hidden_act", "silu", where) != "silu") {
    throw InputError(fmt::format("{}: 'hidden_act': expected silu, found '{}'", where,
                                 excerpt(json_string(json, "hidden_act", where))));
  }
  if (json_has(json, "sliding_window")) {
    throw InputError(
        fmt::format("{}: 'sliding_window': expected null, found {}: sliding windows are not supported", where,
                    json_int(json, "sliding_window", where, 0, kMaxPositions)));
  }
  if (json_has(json, "quantization_config")) {
    throw InputError(fmt::format("{}: 'quantization_config': quantised weights are not supported", where));
  }
  read_shape(json, c, where);
  c.norm_eps = optional_number(json, "rms_norm_eps", 1e-6, where, 1e-12, 1.0);
  read_rope(json, c, where);
  c.tied_embeddings = optional_bool(json, "tie_word_embeddings", false, where);
  c.attention_bias = optional_bool(json, "attention_bias", false, where);
  c.mlp_bias = optional_bool(json, "mlp_bias", false, where);
  c.bos = read_ids(json, "bos_token_id", c.vocab, where);
  c.eos = read_ids(json, "eos_token_id", c.vocab, where);
  return c;
}

ModelConfig read_config(const std::filesystem::path& model_dir) {
  if (!std::filesystem::is_directory(model_dir)) {
    throw InputError(model_dir.string() + ": expected a model folder with config.json, found none");
  }
  const auto path = model_dir / "config.json";
  ModelConfig config = parse_config(read_file(path, 16 << 20), path.string());
  const auto generation = model_dir / "generation_config.json";
  if (std::filesystem::exists(generation)) {
    const Json json = parse_json(read_file(generation, 16 << 20), generation.string());
    if (json_has(json, "eos_token_id")) {
      config.eos = read_ids(json, "eos_token_id", config.vocab, generation.string());
    }
  }
  return config;
}

ModelConfig named_shape(std::string_view name) {
  if (name == "llama-3.1-8b") return shape(32, 32, 8, 128, 14336, 128256);
  if (name == "llama-2-7b") return shape(32, 32, 32, 128, 11008, 32000);
  if (name == "llama-3.2-1b") return shape(16, 32, 8, 64, 8192, 128256);
  if (name == "saap") return shape(1, 4, 1, 128, 14336, 128256);  // what a device of the paper has of a layer
  if (name == "pocket") {
    ModelConfig c = shape(6, 8, 2, 64, 832, 4096);
    c.hidden = 384;
    c.tied_embeddings = true;
    return c;
  }
  std::array<int, 4> n = {};
  if (parse_spelled_shape(name, n)) return shape(n[0], n[1], n[2], n[3], std::int64_t{n[1]} * n[3] * 3, 4096);
  throw InputError(fmt::format(
      "expected a shape llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap or one spelled out as "
      "L32q32kv8d128 (group 1 to 16, even d up to 512), found '{}'",
      name));
}

}  // namespace lode
