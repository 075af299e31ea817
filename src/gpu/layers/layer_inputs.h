// SPDX-License-Identifier: Apache-2.0
// Numbers of each token that every layer of a model is given beside the stream (LayerInputPlan), for the rows of one step
// at a time. Products are the caller's: few rows, many, or those of many sequences.
#pragma once

#include <functional>

#include "gpu/model.h"
#include "kernels/cuda/linear/layer_inputs.h"

namespace lode {

class LayerInputs {
 public:
  /// y [n, w.rows] = x w^T of the step's rows.
  using Product = std::function<void(const float* x, const cuda::DeviceWeight& w, float* y)>;

  /// For steps of up to so many rows.
  LayerInputs(const ModelConfig& config, std::int64_t rows, cuda::StreamHandle stream);
  static std::int64_t bytes(const ModelConfig& config, std::int64_t rows);
  /// Of the widest product.
  static std::int64_t most_columns(const ModelConfig& config);
  /// InputError where a token has no such numbers, or none at all.
  static void expect_known(const ModelConfig& config, TokenId id);

  bool none() const { return config_.plan.inputs.width == 0; }
  /// Makes them, of tokens and the stream's beginning x [n, D].
  void make(const CudaModel& model, const TokenId* ids, std::int64_t n, const float* x,
            const Product& product) const;
  /// A layer's input of its product inputs.out, [n, width].
  const float* weigh(int layer, const CudaModel::Layer& w, std::int64_t n, const float* x,
                     const Product& product) const;

 private:
  cuda::LayerInputs sizes(std::int64_t n) const {
    return {.tokens = n, .layers = config_.layers, .width = config_.plan.inputs.width};
  }

  const ModelConfig& config_;
  cuda::StreamHandle stream_;
  cuda::Buffer made_, embedded_;  // [rows, L, width]
  cuda::Buffer gates_;            // [rows, width]
};

/// How what a layer makes of them is added to the stream.
cuda::Addition input_addition(const CudaModel::Layer& layer, const ModelConfig& config);

}  // namespace lode
