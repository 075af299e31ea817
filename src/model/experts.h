// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts: which experts each token goes through, and their feed-forwards. A step reads only the weights
// of experts that a token of the batch chose, once for all of its tokens; a layer's first step makes the tiles of all.
#pragma once

#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "model/layer_plan.h"
#include "model/linear.h"
#include "model/weights.h"

namespace lode {

/// What one token goes through.
struct Choice {
  int expert = 0;
  float weight = 0;
};

/// The choices of each token, best first, from its router's logits [T, E]; equal scores: the lower number first.
std::vector<Choice> choose_experts(const ExpertPlan& plan, std::span<const float> logits,
                                   std::span<const float> choice_bias /*[E] or none*/, std::int64_t tokens);

class Experts {
 public:
  Experts(const ModelPlan& plan, std::int64_t hidden, LinearLayers& linear, ThreadPool& pool)
      : plan_(plan), hidden_(hidden), linear_(linear), pool_(pool) {}

  /// Makes gate [rows, F] the input of down: activation(gate) * up.
  using Activate =
      std::function<void(std::vector<float>& gate, const std::vector<float>& up, std::int64_t rows)>;

  /// Adds the outputs for h [T, D] of the experts that `routed` [T, D] chooses to `out` [T, D].
  void add(const LayerWeights& w, const std::vector<float>& routed, const std::vector<float>& h,
           std::int64_t tokens, const Activate& activate, std::vector<float>& out);

  /// Floats of working memory a token takes.
  std::int64_t scratch_floats() const;

 private:
  /// Some tokens of one expert that go through a product together.
  struct Share {
    int expert = 0;
    bool narrow = false, bf16 = false;
    std::int64_t first = 0, count = 0;  ///< of the sorted rows
  };
  /// A projection of all rows: the weights and biases of each expert, and where it goes.
  struct Projected {
    Weight ExpertWeights::*w;
    Weight ExpertWeights::*bias;
    std::vector<float>* out;  ///< [T * used, w.rows]
  };
  void make_ready(std::span<const ExpertWeights> experts, int chosen);
  void sort_rows(std::span<const Choice> choices, std::int64_t tokens);
  void multiply(const std::vector<float>& x, std::int64_t n, std::span<const std::int64_t> order,
                std::span<const ExpertWeights> experts, std::initializer_list<Projected> projections);
  void add_biases(std::span<const ExpertWeights> experts, const Projected& p);

  const ModelPlan& plan_;
  std::int64_t hidden_;
  LinearLayers& linear_;
  ThreadPool& pool_;
  std::vector<Share> shares_;
  std::vector<std::int64_t> rows_;      // [T, used]: the sorted row of each choice
  std::vector<std::int64_t> token_of_;  // [T * used]: the token of each sorted row
  std::vector<float> logits_, gate_, up_, down_;
};

}  // namespace lode
