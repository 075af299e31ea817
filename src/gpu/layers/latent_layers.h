// SPDX-License-Identifier: Apache-2.0
// Queries and rows of models with latent rows, and the values of what was attended to, in the order of model/latent.cc.
// Products of whole matrices are the caller's: few rows, many, or those of many sequences.
#pragma once

#include <functional>

#include "gpu/model.h"
#include "kernels/cuda/latent/latent.h"

namespace lode {

class LatentLayers {
 public:
  /// y [n, w.rows] = norm(x) w^T.
  using Product = std::function<void(const float* x, const cuda::DeviceWeight& norm,
                                     const cuda::DeviceWeight& w, float* y)>;

  /// For steps of up to so many tokens.
  LatentLayers(const ModelConfig& config, std::int64_t tokens, cuda::StreamHandle stream,
               cuda::Precision precision);
  static std::int64_t bytes(const ModelConfig& config, std::int64_t tokens);
  /// The widest row of a product of the caller's, and of the input of one.
  static std::int64_t most_columns(const ModelConfig& config);

  explicit operator bool() const { return config_.plan.latent.kv_rank > 0; }

  /// Of a step's tokens: their input x [n, D], whether they go through the products of few tokens, and where the layer's
  /// vectors go and how they turn; norm and matrices of `qkv` are not used.
  void project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv, const cuda::Queries& where,
               bool few, const Product& product) const;
  /// values [n, Hq * value] of attended rows [n, Hq, row].
  const float* unfold(const CudaModel::Layer& w, const float* attended, std::int64_t n, bool few) const;

 private:
  void multiply_heads(const cuda::HeadProduct& product, bool few) const;
  cuda::LatentShape shape() const;

  const ModelConfig& config_;
  cuda::StreamHandle stream_;
  cuda::Precision precision_;
  cuda::Buffer low_, q_, kv_;  // [n, q_rank], [n, Hq, nope + rope], [n, row]
  cuda::Buffer by_head_;       // [n, Hq, kv_rank or value]
  cuda::Buffer scratch_;       ///< of the heads' products
};

}  // namespace lode
