// SPDX-License-Identifier: Apache-2.0
// The recurrent layers of a model, and the gates of its attention, for the rows of one step at a time. Products are the
// caller's: few rows, many, or those of many sequences.
#pragma once

#include <functional>
#include <vector>

#include "gpu/model.h"
#include "kernels/cuda/delta/delta.h"

namespace lode {

class DeltaLayers {
 public:
  /// y [n, w.rows] = norm(x) w^T of the step's rows x, which are the layer's input.
  using Product = std::function<void(const cuda::DeviceWeight& w, float* y)>;

  /// For steps of up to so many rows.
  DeltaLayers(const ModelConfig& config, std::int64_t rows, cuda::StreamHandle stream);
  static std::int64_t bytes(const ModelConfig& config, std::int64_t rows);
  /// The widest row of a product, and of the input of one.
  static std::int64_t most_columns(const ModelConfig& config);

  bool recurrent(int layer) const { return config_.plan.layer(layer).recurrent; }
  /// Floats of a sequence's state, all layers together.
  static std::int64_t state_floats(const ModelConfig& config);

  /// Of recurrent layers: the input of the layer's last product, [n, values]. `single`: no row has more than one token.
  const float* run(int layer, const CudaModel::Layer& w, std::int64_t n,
                   std::span<const cuda::DeltaRows> rows, bool single, const Product& product) const;
  /// attention [n, Hq, d] *= sigmoid(gates), where the layer has such.
  void gate(const CudaModel::Layer& w, std::int64_t n, float* attention, const Product& product) const;

 private:
  cuda::DeltaLayer layer_of(const CudaModel::Delta& w) const;

  const ModelConfig& config_;
  cuda::StreamHandle stream_;
  std::vector<std::int64_t> begin_;           // [L] of each layer's state
  cuda::Buffer products_;                     // [n, most_columns]
  cuda::Buffer convolved_, gates_, outputs_;  // [n, channels], [n, 2, Hv], [n, values]
};

}  // namespace lode
