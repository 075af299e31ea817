// SPDX-License-Identifier: Apache-2.0
// The families of models that can be read: how config.json fills in the plan, and where each tensor goes. A
// new family without new parts is one entry of the table in family.cc.
#pragma once

#include <array>
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
  qkv_bias,  ///< of all three, in this order
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
  mlp_post_norm,
  sinks,     ///< a logit for each query head
  latent_q,  ///< straight from the stream
  latent_q_a,
  latent_q_a_norm,
  latent_q_b,
  latent_kv_a,
  latent_kv_a_norm,
  latent_kv_b,  ///< of each head W_k [nope, kv_rank], then W_v [value, kv_rank]
  latent_k_b,   ///< of each head W_k [kv_rank, nope], transposed
  latent_v_b,
  q_and_gate,  ///< of each query head q's rows, then those of the output's gate
  delta_qkv,
  delta_z,
  delta_qkvz,  ///< of each key head its q, k, v and z
  delta_b,
  delta_a,
  delta_ba,  ///< of each key head its b and a
  delta_conv,
  delta_dt_bias,
  delta_decay,
  delta_norm,
  delta_out,
  router,
  router_bias,
  choice_bias,
  shared_gate,
  layer_factor,  ///< a single number
  // What layers are given beside the stream (LayerInputPlan); the first three are the model's.
  input_embedding,
  input_projection,
  input_projection_norm,
  input_gate,
  input_out,
  input_norm,
  // Of experts that stand apart (ExpertPlan::apart).
  dense_post_norm,
  experts_norm,
  experts_post_norm,
  router_norm,
  expert_factors,
  // One tensor for each expert, with a second {} in its name, or one for all of them.
  expert_gate,
  expert_up,
  expert_gate_up,  ///< gate and up in one matrix, in this order
  expert_down,
  expert_gate_bias,
  expert_up_bias,
  expert_gate_up_bias,
  expert_down_bias
};

/// How a folder holds a tensor of all experts; GGUF files always hold rows.
enum class TensorForm {
  rows,        ///< [E, out, in], as a projection
  transposed,  ///< [E, in, out]; gate and up take turns
  mxfp4        ///< rows in blocks NAME_blocks [E, out, in / 32, 16] and NAME_scales; gate and up take turns
};

/// What the two kinds of files call a tensor; {} stands for the layer. Empty: that kind has no such tensor. A place
/// may have several names: the first that a file has is taken.
struct TensorName {
  Place place;
  std::string_view folder, gguf;
  TensorForm form = TensorForm::rows;
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
  bool folder_pairs = false;  ///< so do they in folders
  bool partial_rope = false;  ///< a part of each head may turn
  std::array<int, 3> rope_sections =
      {};                    ///< ModelPlan's, where config.json does not say them; none: it has none
  bool tied = false;         ///< what config.json means when it does not say whether embeddings are tied
  bool experts = false;      ///< has a mixture of experts: tells apart families of one GGUF architecture
  bool experts_too = false;  ///< may have one
};

std::span<const Family> families();
/// Null when there is none.
const Family* find_family(std::string_view architecture);
const Family* find_gguf_family(std::string_view architecture, bool experts = false);

/// The family of a config; Llama where none is named, as in shapes made up for benchmarks.
const Family& family_of(const ModelConfig& c);
/// A config.json that is parsed already, checked as parse_config does.
ModelConfig config_of(const Json& json, std::string_view where);

/// All names of a family's tensors: its own, then the usual ones of places that it does not name.
std::vector<TensorName> tensor_names(const Family& family);

}  // namespace lode
