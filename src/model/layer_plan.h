// SPDX-License-Identifier: Apache-2.0
// What a model computes beside the sizes of its matrices, as data: the forward passes walk it, and a family
// of models is a way to fill it in. The defaults are Llama's.
//
// What later families need has its place here: a layer that is no attention (recurrent, with its state beside
// the rows), a mixture of experts instead of one feed-forward, a sink logit per head, and heads of another
// number or width in some layers belong to LayerPlan; a soft cap of scores and keys that differ in width from
// values to ModelPlan.
#pragma once

#include <cstdint>
#include <vector>

namespace lode {

enum class ActivationKind { silu, gelu_tanh };

/// How queries and keys of a layer get their positions.
enum class Turn {
  usual,  ///< by the model's RoPE
  local,  ///< by one with the base local_theta and without scaling
  none    ///< not at all
};

struct LayerPlan {
  std::int64_t window = 0;  ///< keys that a query attends to, its own included; 0 = all up to its own
  Turn turn = Turn::usual;
};

struct ModelPlan {
  // Attention
  bool q_bias = false, k_bias = false, v_bias = false, o_bias = false;
  bool qk_norm = false;    ///< RMS norm of each head of q and k before RoPE
  int rotary_dim = 0;      ///< dimensions of a head that turn; 0 = all
  double local_theta = 0;  ///< base of the RoPE of Turn::local
  double score_scale = 0;  ///< of q.k; 0 = 1 / sqrt(d)
  /// Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / query_growth_start)).
  double query_growth = 0;
  std::int64_t query_growth_start = 1;
  // Feed-forward: down(activation(gate(h)) * up(h))
  ActivationKind activation = ActivationKind::silu;
  bool gate_bias = false, up_bias = false, down_bias = false;
  // Norms
  bool norm_plus_one = false;  ///< gains are 1 + weight
  bool post_norms = false;     ///< attention and feed-forward have a norm behind them too
  // The residual stream
  double embedding_multiplier = 1, residual_multiplier = 1;
  double logit_divisor = 1, logit_cap = 0;  ///< cap 0: none; else cap * tanh(logit / cap)

  std::vector<LayerPlan> layers = {};  ///< [L]; empty: all are alike
  LayerPlan layer(int index) const {
    return layers.empty() ? LayerPlan{} : layers[static_cast<std::size_t>(index)];
  }
};

}  // namespace lode
