// SPDX-License-Identifier: Apache-2.0
// Hyper-parameters of a Llama-family model, read from Hugging Face's config.json and checked together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/types.h"

namespace lode {

struct RopeScaling {
  enum class Kind { none, linear, dynamic, yarn, llama3 };
  Kind kind = Kind::none;
  double factor = 1.0;
  std::int64_t original_max_positions = 0;
  // llama3
  double low_freq_factor = 1.0, high_freq_factor = 4.0;
  // yarn
  double beta_fast = 32.0, beta_slow = 1.0, attention_factor = 0.0;  ///< 0: 0.1 ln(factor) + 1
  double mscale = 0.0, mscale_all_dim = 0.0;
  bool truncate = true;
};

/// As config.json has it.
std::string_view name_of(RopeScaling::Kind kind);

struct ModelConfig {
  std::string architecture;       ///< "LlamaForCausalLM" or "MistralForCausalLM"
  std::int64_t hidden = 0;        // D
  std::int64_t intermediate = 0;  // F
  int layers = 0;                 // L
  int query_heads = 0;            // Hq
  int kv_heads = 0;               // Hkv
  int head_dim = 0;               // d, even
  std::int64_t vocab = 0;         // V
  std::int64_t max_positions = 0;
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool tied_embeddings = false;
  bool attention_bias = false, mlp_bias = false;
  std::vector<TokenId> bos, eos;  ///< may be empty; generation_config.json's list wins for eos

  int group() const { return query_heads / kv_heads; }
};

/// Reads DIR/config.json and DIR/generation_config.json (optional). InputError names the field. Old
/// (`rope_scaling`) and new (`rope_parameters`) forms; sliding windows in use, unknown architectures and
/// scalings are refused by name.
ModelConfig read_config(const std::filesystem::path& model_dir);
ModelConfig parse_config(std::string_view json, std::string_view where);

/// Shapes by name for `--random` and `bench`: llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap or
/// "L32q32kv8d128". InputError lists the names.
ModelConfig named_shape(std::string_view name);

}  // namespace lode
