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
#include "base/unreadable.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/family.h"
#include "model/text_part.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxWidth = 1 << 20, kMaxVocab = 4 << 20;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 30;
constexpr double kHuge = 1e15;
constexpr double kLeastTheta = 2.0;  // YaRN divides by its logarithm

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

const Family& read_family(const Json& json, std::string_view where) {
  std::vector<std::string_view> known;
  for (const Family& family : families()) known.push_back(family.architecture);
  const Json& names = json_member(json, "architectures");
  if (!names.is_array() || names.size() != 1 || !names[0].is_string()) {
    throw InputError(
        fmt::format("{}: 'architectures': expected one of {}, found none", where, fmt::join(known, ", ")));
  }
  const std::string name = names[0].get<std::string>();
  if (const Family* const family = find_family(name)) return *family;
  throw UnreadableError(fmt::format("{}: 'architectures': expected one of {}, found '{}'", where,
                                    fmt::join(known, ", "), excerpt(name)));
}

RopeScaling::Kind scaling_kind(const std::string& name, std::string_view where) {
  using enum RopeScaling::Kind;
  for (const RopeScaling::Kind kind :
       {none, linear, dynamic, yarn, llama3, longrope, divisors, proportional}) {
    if (name_of(kind) == name) return kind;
  }
  if (name == "su") return longrope;  // what Phi-3 called it first
  if (name == "mrope") return none;   // of images: the three positions of a text's token are one
  throw InputError(fmt::format(
      "{}: RoPE scaling: expected default, linear, dynamic, yarn, llama3, longrope or proportional, "
      "found '{}'",
      where, excerpt(name)));
}

/// A divisor for each pair of dimensions that turns.
std::vector<float> read_divisors(const Json& json, const char* key, const ModelConfig& c,
                                 std::string_view where) {
  const int turning = c.plan.rotary_dim > 0 ? c.plan.rotary_dim : c.head_dim;
  const Json& list = json_member(json, key);
  if (!list.is_array() || std::ssize(list) != turning / 2)
    throw InputError(fmt::format("{}: RoPE scaling: '{}': expected a list of {} numbers, found {}", where,
                                 key, turning / 2, list.is_array() ? fmt::to_string(list.size()) : "none"));
  std::vector<float> divisors;
  for (const Json& x : list)
    divisors.push_back(static_cast<float>(json_number({{key, x}}, key, where, 1e-6, 1e31)));
  return divisors;
}

/// LongRoPE: the factor is how far the model was stretched, which follows from its two context lengths.
void read_longrope(const Json& json, const Json& scaling, const ModelConfig& c, RopeScaling& s,
                   std::string_view where) {
  const Json& holder = json_has(scaling, "original_max_position_embeddings") ? scaling : json;
  s.original_max_positions = json_int(holder, "original_max_position_embeddings", where, 2, kMaxPositions);
  s.factor = optional_number(
      scaling, "factor", static_cast<double>(c.max_positions) / static_cast<double>(s.original_max_positions),
      where, 1e-6, kHuge);
  s.attention_factor = optional_number(scaling, "attention_factor", 0.0, where, 1e-6, 1e6);
  s.short_divisors = read_divisors(scaling, "short_factor", c, where);
  s.long_divisors = read_divisors(scaling, "long_factor", c, where);
}

/// `json` is rope_scaling (transformers 4: "type" or "rope_type") or rope_parameters (transformers 5).
RopeScaling read_scaling(const Json& model, const Json& json, const ModelConfig& config,
                         std::string_view where) {
  RopeScaling s;
  if (!json.is_object())
    throw InputError(fmt::format("{}: RoPE scaling: expected an object, found {}", where, json.type_name()));
  s.kind = scaling_kind(json_string(json, json_has(json, "rope_type") ? "rope_type" : "type", where), where);
  if (s.kind == RopeScaling::Kind::none) return s;
  if (s.kind == RopeScaling::Kind::longrope) {
    read_longrope(model, json, config, s, where);
    return s;
  }
  if (s.kind == RopeScaling::Kind::divisors) {
    s.short_divisors = read_divisors(json, "divisors", config, where);
    return s;
  }
  if (s.kind == RopeScaling::Kind::proportional) {
    s.share = optional_number(json, "partial_rotary_factor", 1.0, where, 0.0, 1.0);
    s.factor = optional_number(json, "factor", 1.0, where, 1e-6, kHuge);
    return s;
  }
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

/// How many dimensions of a head turn.
void read_rotary_dim(const Json& json, ModelConfig& c, std::string_view where) {
  const double share = optional_number(json, "partial_rotary_factor", 1.0, where, 0.0, 1.0);
  const bool of_all = json_member(json, "rope_type") == Json("proportional");  // the scaling says which turn
  if (share == 1.0 || of_all) return;
  if (!family_of(c).partial_rope)
    throw UnreadableError(
        fmt::format("{}: 'partial_rotary_factor': expected 1 in this architecture, found {}", where, share));
  c.plan.rotary_dim = static_cast<int>(c.head_dim * share + 1e-6);
  if (c.plan.rotary_dim < 2 || c.plan.rotary_dim % 2 != 0)
    throw UnreadableError(
        fmt::format("{}: 'partial_rotary_factor': expected an even number of at least 2 of {} dimensions to "
                    "turn, found {}",
                    where, c.head_dim, c.plan.rotary_dim));
}

/// Models with two kinds of layers have parameters for each; those of full attention are the model's.
const Json& rope_parameters(const Json& json) {
  const Json& all = json_member(json, "rope_parameters");
  return json_has(all, "full_attention") ? all["full_attention"] : all;
}

/// Of architectures that have them; GGUF files write a fourth.
std::array<int, 3> rope_sections(const Json& rope, const Family& family, std::string_view where) {
  std::array<int, 3> sections = family.rope_sections;
  if (sections == std::array<int, 3>{} || !json_has(rope, "mrope_section")) return sections;
  const Json& given = rope["mrope_section"];
  if (!given.is_array() || given.size() < sections.size() || given.size() > sections.size() + 1)
    throw InputError(fmt::format("{}: 'mrope_section': expected a list of 3 numbers", where));
  for (std::size_t i = 0; i < sections.size(); ++i)
    sections[i] =
        static_cast<int>(json_int({{"mrope_section", given[i]}}, "mrope_section", where, 0, kMaxHeadDim));
  return sections;
}

void read_rope(const Json& json, ModelConfig& config, std::string_view where) {
  config.rope_theta = optional_number(json, "rope_theta", 10000.0, where, kLeastTheta, kHuge);
  read_rotary_dim(json, config, where);
  if (const Json& rope = rope_parameters(json); !rope.is_null()) {
    config.rope_theta = optional_number(rope, "rope_theta", config.rope_theta, where, kLeastTheta, kHuge);
    read_rotary_dim(rope, config, where);
    config.rope_scaling = read_scaling(json, rope, config, where);
  } else if (json_has(json, "rope_scaling")) {
    config.rope_scaling = read_scaling(json, json["rope_scaling"], config, where);
  }
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

/// What says how wide a feed-forward is. Models all of whose layers are mixtures may name their experts' alone.
const char* width_key(const Json& json) {
  for (const char* const key :
       {"intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size"})
    if (json_has(json, key)) return key;
  return "intermediate_size";
}

void read_shape(const Json& json, ModelConfig& c, std::string_view where) {
  c.hidden = json_int(json, "hidden_size", where, 1, kMaxWidth);
  c.intermediate = json_int(json, width_key(json), where, 1, kMaxWidth);
  c.layers = static_cast<int>(json_int(json, "num_hidden_layers", where, 1, kMaxLayers));
  c.query_heads = static_cast<int>(json_int(json, "num_attention_heads", where, 1, kMaxHeads));
  c.kv_heads =
      static_cast<int>(optional_int(json, "num_key_value_heads", c.query_heads, where, 1, kMaxHeads));
  c.vocab = json_int(json, "vocab_size", where, 1, kMaxVocab);
  c.max_positions = json_int(json, "max_position_embeddings", where, 1, kMaxPositions);
  // Of models that have two, those of layers without a window.
  const char* const head_dim = json_has(json, "global_head_dim") ? "global_head_dim" : "head_dim";
  c.head_dim =
      static_cast<int>(optional_int(json, head_dim, c.hidden / c.query_heads, where, 1, kMaxHeadDim));
  if (!json_has(json, head_dim) && c.hidden % c.query_heads != 0) {
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

/// The sizes of OLMoE-1B-7B with the layers of a Qwen3 MoE: 1.2 billion weights a token of 6.9.
Json olmoe_shape() {
  return {{"architectures", {"Qwen3MoeForCausalLM"}},
          {"hidden_size", 2048},
          {"intermediate_size", 1024},
          {"moe_intermediate_size", 1024},
          {"num_hidden_layers", 16},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 16},
          {"head_dim", 128},
          {"num_experts", 64},
          {"num_experts_per_tok", 8},
          {"vocab_size", 50304},
          {"max_position_embeddings", 1 << 20}};
}

Json qwen3_moe_shape() {
  return {{"architectures", {"Qwen3MoeForCausalLM"}},
          {"hidden_size", 2048},
          {"intermediate_size", 6144},
          {"moe_intermediate_size", 768},
          {"num_hidden_layers", 48},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 4},
          {"head_dim", 128},
          {"num_experts", 128},
          {"num_experts_per_tok", 8},
          {"norm_topk_prob", true},
          {"vocab_size", 151936},
          {"rope_theta", 1e6},
          {"max_position_embeddings", 1 << 20}};
}

Json qwen_hybrid_shape() {
  return {{"architectures", {"Qwen3_5MoeForCausalLM"}},
          {"hidden_size", 2048},
          {"moe_intermediate_size", 512},
          {"shared_expert_intermediate_size", 512},
          {"num_hidden_layers", 40},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 2},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 32},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"num_experts", 256},
          {"num_experts_per_tok", 8},
          {"vocab_size", 248320},
          {"rope_theta", 1e7},
          {"partial_rotary_factor", 0.25},
          {"max_position_embeddings", 1 << 20}};
}

Json gpt_oss_shape() {
  return {{"architectures", {"GptOssForCausalLM"}},
          {"hidden_size", 2880},
          {"intermediate_size", 2880},
          {"num_hidden_layers", 24},
          {"num_attention_heads", 64},
          {"num_key_value_heads", 8},
          {"head_dim", 64},
          {"num_local_experts", 32},
          {"num_experts_per_tok", 4},
          {"sliding_window", 128},
          {"vocab_size", 201088},
          {"rope_theta", 150000.0},
          {"rope_scaling",
           {{"rope_type", "yarn"},
            {"factor", 32.0},
            {"beta_fast", 32.0},
            {"beta_slow", 1.0},
            {"truncate", false},
            {"original_max_position_embeddings", 4096}}},
          {"max_position_embeddings", 131072}};
}

}  // namespace

int ModelConfig::most_kv_heads() const {
  int most = kv_heads;
  for (int layer = 0; layer < layers; ++layer) most = std::max(most, kv_heads_of(layer));
  return most;
}

int ModelConfig::most_head_dim() const {
  int most = head_dim;
  for (int layer = 0; layer < layers; ++layer) most = std::max(most, head_dim_of(layer));
  return most;
}

std::int64_t ModelConfig::most_kv_columns() const {
  std::int64_t most = std::int64_t{kv_heads} * head_dim;
  for (int layer = 0; layer < layers; ++layer)
    most = std::max(most, std::int64_t{kv_heads_of(layer)} * head_dim_of(layer));
  return most;
}

void expect_like_layers(const ModelConfig& c, std::string_view who) {
  for (int layer = 0; layer < c.layers; ++layer)
    if (c.kv_heads_of(layer) != c.kv_heads || c.head_dim_of(layer) != c.head_dim ||
        !c.plan.layer(layer).own_rows())
      throw InputError(
          fmt::format("{}: expected a model whose layers all have {} KV heads of {} and rows of their own, "
                      "found layer {} with "
                      "others",
                      who, c.kv_heads, c.head_dim, layer));
}

ModelConfig parse_config(std::string_view text, std::string_view where) {
  return config_of(parse_json(text, where), where);
}

ModelConfig config_of(const Json& json, std::string_view where) {
  if (has_text_part(json)) {
    ModelConfig c = config_of(text_part(json, where), where);
    c.text_part = true;
    return c;
  }
  ModelConfig c;
  const Family& family = read_family(json, where);
  c.architecture = family.architecture;
  // Of folders' quantised forms one is read: gpt-oss's experts.
  if (json_has(json, "quantization_config") &&
      json_member(json["quantization_config"], "quant_method") != Json("mxfp4")) {
    throw UnreadableError(
        fmt::format("{}: 'quantization_config': expected weights of 16 or 32 bits, found quantised ones: "
                    "take a GGUF file "
                    "of the model, or its original",
                    where));
  }
  read_shape(json, c, where);
  c.norm_eps = optional_number(json, "rms_norm_eps", 1e-6, where, 1e-12, 1.0);
  read_rope(json, c, where);
  const Json& rope = rope_parameters(json);
  c.plan.rope_sections =
      rope_sections(rope.is_null() ? json_member(json, "rope_scaling") : rope, family, where);
  c.tied_embeddings = optional_bool(json, "tie_word_embeddings", family.tied, where);
  c.bos = read_ids(json, "bos_token_id", c.vocab, where);
  c.eos = read_ids(json, "eos_token_id", c.vocab, where);
  family.plan(json, c, where);
  return c;
}

namespace {

/// Names the model that may be meant where the folder around it, or that of a GGUF file, was given.
void expect_model_folder(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code failed;
  const bool folder = fs::is_directory(path, failed);
  if (folder && fs::symlink_status(path / "config.json", failed).type() != fs::file_type::not_found) return;
  std::string inside;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, failed)) {
    const bool model =
        entry.path().extension() == ".gguf" || fs::exists(entry.path() / "config.json", failed);
    if (model && (inside.empty() || entry.path().string() < inside)) inside = entry.path().string();
  }
  throw InputError(fmt::format("{}: expected a model folder with config.json or a GGUF file, found {}{}",
                               path.string(),
                               folder                     ? "a folder without config.json"
                               : fs::exists(path, failed) ? "another file"
                                                          : "nothing there",
                               inside.empty() ? "" : fmt::format("; '{}' may be meant", inside)));
}

}  // namespace

ModelConfig read_config(const std::filesystem::path& model_dir) {
  expect_model_folder(model_dir);
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
  if (name == "olmoe-1b-7b") return config_of(olmoe_shape(), name);
  if (name == "qwen3-30b-a3b") return config_of(qwen3_moe_shape(), name);
  if (name == "qwen3.6-35b-a3b") return config_of(qwen_hybrid_shape(), name);
  if (name == "gpt-oss-20b") return config_of(gpt_oss_shape(), name);
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
      "expected a shape llama-3.1-8b, llama-2-7b, llama-3.2-1b, olmoe-1b-7b, qwen3-30b-a3b, "
      "qwen3.6-35b-a3b, gpt-oss-20b, pocket, saap or one spelled out as L32q32kv8d128 (group 1 to "
      "16, even d up to {}), found '{}'",
      kMaxHeadDim, name));
}

}  // namespace lode
