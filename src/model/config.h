// SPDX-License-Identifier: Apache-2.0
// Sizes and plan of a model, read from Hugging Face's config.json and checked together.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/rope.h"
#include "lodestone/types.h"
#include "model/layer_plan.h"

namespace lode {

struct ModelConfig {
  std::string architecture;       ///< "LlamaForCausalLM", ...: which family (family.h)
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
  bool text_part = false;  ///< of a model that also sees, whose other parts are not read
  bool tied_embeddings = false;
  ModelPlan plan;                 ///< what is computed beside these sizes
  std::vector<TokenId> bos, eos;  ///< may be empty; generation_config.json's list wins for eos

  int group() const { return query_heads / kv_heads; }
  /// What Rope is made from.
  operator RopeShape() const { return {head_dim, plan.rotary_dim, rope_theta, rope_scaling}; }
};

/// What q.k is multiplied by.
inline float score_scale(const ModelConfig& c) {
  return c.plan.score_scale > 0 ? static_cast<float>(c.plan.score_scale)
                                : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
}

/// Reads DIR/config.json and DIR/generation_config.json (optional). InputError names the field. Old
/// (`rope_scaling`) and new (`rope_parameters`) forms; unknown architectures and scalings are refused by name.
ModelConfig read_config(const std::filesystem::path& model_dir);
ModelConfig parse_config(std::string_view json, std::string_view where);

/// Shapes by name for `--random` and `bench`: llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap or
/// "L32q32kv8d128". InputError lists the names.
ModelConfig named_shape(std::string_view name);

}  // namespace lode
