// SPDX-License-Identifier: Apache-2.0
#include "gpu/layers/layer_inputs.h"

#include <fmt/format.h>

#include <cmath>

#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float);

}  // namespace

LayerInputs::LayerInputs(const ModelConfig& config, std::int64_t rows, cuda::StreamHandle stream)
    : config_(config), stream_(stream) {
  if (none()) return;
  const char* const what = "numbers of tokens for layers";
  made_ = cuda::Buffer(sizes(rows).numbers() * kFloat, what);
  embedded_ = cuda::Buffer(made_.bytes(), what);
  gates_ = cuda::Buffer(rows * config.plan.inputs.width * kFloat, what);
}

std::int64_t LayerInputs::bytes(const ModelConfig& c, std::int64_t rows) {
  return rows * (2 * most_columns(c) + c.plan.inputs.width) * kFloat;
}
std::int64_t LayerInputs::most_columns(const ModelConfig& c) {
  return std::int64_t{c.layers} * c.plan.inputs.width;
}

void LayerInputs::expect_known(const ModelConfig& c, TokenId id) {
  if (id < 0 || id >= c.vocab)
    throw InputError(fmt::format("expected token ids from 0 to {}, found {}", c.vocab - 1, id));
  if (c.plan.inputs.width > 0 && id >= c.plan.inputs.vocab)
    throw InputError(
        fmt::format("expected token ids from 0 to {}, which have numbers for each layer, found {}",
                    c.plan.inputs.vocab - 1, id));
}

void LayerInputs::make(const CudaModel& model, const TokenId* ids, std::int64_t n, const float* x,
                       const Product& product) const {
  if (none()) return;
  const double width = config_.plan.inputs.width, hidden = static_cast<double>(config_.hidden);
  product(x, model.input_projection, made_.as<float>());
  cuda::embed(ids, n, model.input_embedding, embedded_.as<float>(), stream_,
              static_cast<float>(std::sqrt(width)));
  cuda::join_inputs(sizes(n), static_cast<float>(1 / std::sqrt(hidden)), model.input_projection_norm,
                    static_cast<float>(config_.norm_eps), embedded_.as<float>(), made_.as<float>(), stream_);
}

const float* LayerInputs::weigh(int layer, const CudaModel::Layer& w, std::int64_t n, const float* x,
                                const Product& product) const {
  product(x, w.inputs.gate, gates_.as<float>());
  cuda::weigh_inputs(sizes(n), made_.as<float>(), layer, mlp_of(w, config_).activation, gates_.as<float>(),
                     stream_);
  return gates_.as<float>();
}

cuda::Addition input_addition(const CudaModel::Layer& layer, const ModelConfig& config) {
  return {layer.inputs.norm, static_cast<float>(config.norm_eps),
          static_cast<float>(config.plan.residual_multiplier), layer.factor};
}

}  // namespace lode
