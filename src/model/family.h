// SPDX-License-Identifier: Apache-2.0
// The families of models that can be read: how config.json fills in the plan, and where each tensor goes. A
// new family without new parts is one entry of the table in family.cc.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "model/config.h"

namespace lode {

/// A place for a tensor in the plan.
enum class Place {
  embedding,
  final_norm,
  output,
  attention_norm,
  q,
  k,
  v,
  qkv,  ///< q, k and v in one matrix, in this order
  q_bias,
  k_bias,
  v_bias,
  q_norm,
  k_norm,
  o,
  o_bias,
  attention_post_norm,
  mlp_norm,
  gate,
  up,
  gate_up,  ///< gate and up in one matrix, in this order
  gate_bias,
  up_bias,
  down,
  down_bias,
  mlp_post_norm
};

/// What the two kinds of files call a tensor; {} stands for the layer.
struct TensorName {
  Place place;
  std::string_view folder, gguf;
};

struct Family {
  std::string_view name;          ///< for people: "Qwen3"
  std::string_view architecture;  ///< in config.json
  std::string_view gguf;          ///< general.architecture
  /// Completes the config, whose sizes, norm and RoPE are read already, by what the family has beside them.
  void (*plan)(const Json& config, ModelConfig& c, std::string_view where);
  std::span<const TensorName> own_names = {};  ///< before the usual ones
  /// Rows of q and k in GGUF files go in pairs (i, i + d/2), as their readers turn neighbours.
  bool gguf_pairs = false;
  bool partial_rope = false;  ///< a part of each head may turn
  bool tied = false;          ///< what config.json means when it does not say whether embeddings are tied
};

std::span<const Family> families();
/// Null when there is none.
const Family* find_family(std::string_view architecture);
const Family* find_gguf_family(std::string_view architecture);

/// The family of a config; Llama where none is named, as in shapes made up for benchmarks.
const Family& family_of(const ModelConfig& c);
/// A config.json that is parsed already, checked as parse_config does.
ModelConfig config_of(const Json& json, std::string_view where);

/// All names of a family's tensors: its own, then the usual ones of places that it does not name.
std::vector<TensorName> tensor_names(const Family& family);

}  // namespace lode
