// SPDX-License-Identifier: Apache-2.0
// Numbers of each token that every layer is given beside the stream (LayerInputPlan of layer_plan.h), between the
// products that make them and use them.
#pragma once

#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// Numbers of tokens for layers, side by side.
struct LayerInputs {
  std::int64_t tokens = 0, layers = 0, width = 0;
  std::int64_t numbers() const { return tokens * layers * width; }
};

/// made [tokens, layers, width] = (rms_norm(scale * made) gain + embedded) / sqrt(2), each norm over a width.
void join_inputs(const LayerInputs& sizes, float scale, const DeviceWeight& gain /*[1, width]*/, float eps,
                 const float* embedded, float* made, StreamHandle stream);

/// gates [tokens, width] = activation(gates) * the numbers of one layer.
void weigh_inputs(const LayerInputs& sizes, const float* made, std::int64_t layer,
                  const Activation& activation, float* gates, StreamHandle stream);

}  // namespace lode::cuda
