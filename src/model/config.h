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
  int kv_heads = 0;               // Hkv; of layers that say nothing else
  int head_dim = 0;               // d, even; the same
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
  int kv_heads_of(int layer) const {
    const int own = plan.layer(layer).kv_heads;
    return own > 0 ? own : kv_heads;
  }
  int head_dim_of(int layer) const {
    const int own = plan.layer(layer).head_dim;
    return own > 0 ? own : head_dim;
  }
  /// The most that any layer has: lists of heads [L, Hkv] have so many for each.
  int most_kv_heads() const;
  int most_head_dim() const;
  /// Columns of q, or of k and v, that hold any layer's.
  std::int64_t most_query_columns() const { return std::int64_t{query_heads} * most_head_dim(); }
  std::int64_t most_kv_columns() const;
  /// What Rope is made from.
  operator RopeShape() const { return {head_dim, plan.rotary_dim, rope_theta, rope_scaling}; }
};

/// What q.k is multiplied by.
inline float score_scale(const ModelConfig& c) {
  return c.plan.score_scale > 0 ? static_cast<float>(c.plan.score_scale)
                                : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
}

/// InputError where layers have heads of different sizes: `who` works on heads that are alike.
void expect_like_layers(const ModelConfig& config, std::string_view who);

/// Reads DIR/config.json and DIR/generation_config.json (optional). InputError names the field. Old
/// (`rope_scaling`) and new (`rope_parameters`) forms; unknown architectures and scalings are refused by name.
ModelConfig read_config(const std::filesystem::path& model_dir);
ModelConfig parse_config(std::string_view json, std::string_view where);

/// Shapes by name for `--random` and `bench`: llama-3.1-8b, llama-2-7b, llama-3.2-1b, mixtures of experts (olmoe-1b-7b,
/// qwen3-30b-a3b, qwen3.6-35b-a3b, gpt-oss-20b), pocket, saap or "L32q32kv8d128". InputError lists the names.
ModelConfig named_shape(std::string_view name);

}  // namespace lode
