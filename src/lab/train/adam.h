// SPDX-License-Identifier: Apache-2.0
// Adam (Kingma and Ba 2015), with decoupled weight decay as an option (Loshchilov and Hutter 2019).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lab/train/mlp.h"

namespace lode {

struct AdamOptions {
  double rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.0;
};

class Adam {
 public:
  /// Of all trained parameters of a module, which outlives the optimiser and stays where it is.
  Adam(Module& module, const AdamOptions& options);
  /// One update from the gradients; `rate_scale` multiplies the rate (a schedule).
  void step(double rate_scale = 1.0);
  std::int64_t steps() const { return steps_; }

  /// The numbers of one update, corrections for the moments' start included: value = keep * value - rate *
  /// first / (sqrt(second) + epsilon).
  struct Update {
    float rate = 0, keep = 1, epsilon = 0;
  };
  /// Counts a step, whose update somebody else makes.
  Update count_step(double rate_scale);
  const AdamOptions& options() const { return options_; }

  /// What resuming needs, beside the module's own parameters: first and second moments by parameter.
  struct Moments {
    std::string name;
    Parameter* parameter;
    std::vector<float> first, second;
  };
  std::vector<Moments>& moments() { return moments_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  AdamOptions options_;
  std::int64_t steps_ = 0;
  std::vector<Moments> moments_;
};

/// 1 at first, falling to `last` at `steps` along half a cosine.
double cosine_decay(std::int64_t step, std::int64_t steps, double last = 0.0);

}  // namespace lode
