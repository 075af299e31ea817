// SPDX-License-Identifier: Apache-2.0
#include "model/text_part.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kTextModels = {{
    {"gemma3_text", "Gemma3ForCausalLM"},
    {"gemma4_text", "Gemma4ForCausalLM"},
    {"mistral", "MistralForCausalLM"},
    {"ministral3", "Ministral3ForCausalLM"},
    {"qwen2_5_vl_text", "Qwen2ForCausalLM"},
    {"qwen3_vl_text", "Qwen3ForCausalLM"},
    {"qwen3_5_text", "Qwen3_5ForCausalLM"},
    {"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"},
}};

/// Published configurations of Gemma 3 leave out what is usual there.
const Json& usual_of_gemma3() {
  static const Json usual = {{"vocab_size", 262208},
                             {"num_attention_heads", 8},
                             {"num_key_value_heads", 4},
                             {"head_dim", 256},
                             {"max_position_embeddings", 131072},
                             {"rms_norm_eps", 1e-6},
                             {"query_pre_attn_scalar", 256},
                             {"rope_theta", 1e6},
                             {"rope_local_base_freq", 10000.0},
                             {"sliding_window", 4096}};
  return usual;
}

}  // namespace

bool has_text_part(const Json& config) {
  const Json& names = json_member(config, "architectures");
  return names.is_array() && names.size() == 1 && names[0].is_string() &&
         names[0].get<std::string>().ends_with("ForConditionalGeneration") &&
         json_member(config, "text_config").is_object();
}

Json text_part(const Json& config, std::string_view where) {
  Json text = config["text_config"];
  const std::string type = json_string(text, "model_type", where);
  for (const auto& [known, architecture] : kTextModels)
    if (known == type) text["architectures"] = {architecture};
  if (!json_member(text, "architectures").is_array()) {
    std::string names;
    for (const auto& [known, architecture] : kTextModels)
      names += (names.empty() ? "" : ", ") + std::string(known);
    throw UnreadableError(fmt::format("{}: 'text_config.model_type': expected one of {}, found '{}'", where,
                                      names, excerpt(type)));
  }
  if (type == "gemma3_text")
    for (const auto& [key, value] : usual_of_gemma3().items())
      if (!text.contains(key)) text[key] = value;
  for (const char* key : {"bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config"})
    if (config.contains(key) && !text.contains(key)) text[key] = config[key];
  return text;
}

void keep_text_part(WeightFiles& files) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kPrefixes = {{
      {"language_model.model.", "model."},
      {"language_model.lm_head.", "lm_head."},
      {"model.language_model.", "model."},
      {"lm_head.", "lm_head."},
  }};
  NamedTensors text;
  for (auto& [name, tensor] : files.tensors)
    for (const auto& [from, to] : kPrefixes)
      if (name.starts_with(from)) {
        text.emplace(std::string(to) + name.substr(from.size()), std::move(tensor));
        break;
      }
  files.tensors = std::move(text);
}

}  // namespace lode
