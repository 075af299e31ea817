// SPDX-License-Identifier: Apache-2.0
// Recurrent layers by the gated delta rule (layer_plan.h, DeltaPlan), token by token: a state has the same bits
// however its tokens were cut into steps, so that what was read in chunks goes on as what was read at once.
#pragma once

#include <span>
#include <vector>

#include "model/layer_plan.h"
#include "model/linear.h"
#include "model/weights.h"

namespace lode {

class DeltaNet {
 public:
  DeltaNet(const ModelPlan& plan, double norm_eps, LinearLayers& linear, ThreadPool& pool)
      : plan_(plan.delta), norm_eps_(norm_eps), linear_(linear), pool_(pool) {}

  /// Consecutive rows of one sequence, the state before them and where the one after them goes.
  struct Rows {
    std::int64_t first = 0, count = 0;
    std::span<const float> before;
    std::span<float> after;
  };

  /// out [T, D] of h [T, D].
  void run(const DeltaWeights& w, const std::vector<float>& h, std::int64_t tokens,
           std::span<const Rows> rows, std::vector<float>& out);

  /// Floats of working memory that a token takes; 0 without such layers.
  std::int64_t scratch_floats() const;

 private:
  void convolve(const DeltaWeights& w, const Rows& rows);
  void normalise_heads(std::int64_t tokens);
  void set_gates(const DeltaWeights& w, std::int64_t tokens);
  void recur(std::span<const Rows> rows);
  void finish_heads(const DeltaWeights& w, std::int64_t tokens);
  int key_head_of(int value_head) const {
    return plan_.tiled ? value_head % plan_.key_heads : value_head / (plan_.value_heads / plan_.key_heads);
  }

  DeltaPlan plan_;
  double norm_eps_;
  LinearLayers& linear_;
  ThreadPool& pool_;
  std::vector<float> inputs_, qkv_;  // [T, channels] before and after the convolution
  std::vector<float> z_, o_;         // [T, values]
  std::vector<float> decay_, beta_;  // [T, value heads]
};

}  // namespace lode
