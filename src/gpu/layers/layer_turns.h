// SPDX-License-Identifier: Apache-2.0
// How the layers of a model turn queries and keys on the GPU: most as the step's RoPE does, some by a RoPE of their own or
// not at all.
#pragma once

#include <vector>

#include "kernels/rope.h"
#include "model/config.h"

namespace lode {

class LayerTurns {
 public:
  explicit LayerTurns(const ModelConfig& config)
      : config_(config),
        local_({.head_dim = local_head_dim(config),
                .rotary_dim = config.plan.rotary_dim,
                .theta = config.plan.local_theta > 0 ? config.plan.local_theta : config.rope_theta},
               config.max_positions),
        none_(Rope::none(config.head_dim)) {}

  struct Turn {
    const Rope& rope;
    std::int64_t first = 0;  ///< of its frequencies in those of all
  };
  Turn of(int layer, const Rope& usual) const {
    const lode::Turn turn = config_.plan.layer(layer).turn;
    if (turn == lode::Turn::usual) return {usual, 0};
    return {turn == lode::Turn::local ? local_ : none_, config_.head_dim / 2};
  }
  /// [d/2] of the step's RoPE, then those of Turn::local.
  std::vector<float> frequencies(const Rope& usual) const {
    std::vector<float> both(usual.frequencies().begin(), usual.frequencies().end());
    both.insert(both.end(), local_.frequencies().begin(), local_.frequencies().end());
    return both;
  }
  static std::int64_t frequency_bytes(const ModelConfig& c) {
    return (c.head_dim + local_head_dim(c)) / 2 * std::int64_t{sizeof(float)};
  }

 private:
  /// Of the layers that turn by the local base; the model's where none does.
  static int local_head_dim(const ModelConfig& c) {
    for (int layer = 0; layer < c.layers; ++layer)
      if (c.plan.layer(layer).turn == lode::Turn::local) return c.head_dim_of(layer);
    return c.head_dim;
  }

  const ModelConfig& config_;
  Rope local_, none_;
};

}  // namespace lode
