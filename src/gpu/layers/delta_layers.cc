// SPDX-License-Identifier: Apache-2.0
#include "gpu/layers/delta_layers.h"

#include <algorithm>

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float);

/// qkv, z, b and a of a token.
std::int64_t product_columns(const DeltaPlan& d) {
  return d.channels() + d.values() + 2 * std::int64_t{d.value_heads};
}
std::int64_t gate_columns(const ModelConfig& c) {
  return c.plan.attention_gate ? std::int64_t{c.query_heads} * c.head_dim : 0;
}

}  // namespace

std::int64_t DeltaLayers::most_columns(const ModelConfig& c) {
  return std::max(product_columns(c.plan.delta), gate_columns(c));
}

std::int64_t DeltaLayers::bytes(const ModelConfig& c, std::int64_t rows) {
  const DeltaPlan& d = c.plan.delta;
  return rows * kFloat * (most_columns(c) + d.channels() + 2 * std::int64_t{d.value_heads} + d.values());
}

std::int64_t DeltaLayers::state_floats(const ModelConfig& c) {
  std::int64_t all = 0;
  for (const std::int64_t floats : c.plan.recurrent_floats()) all += floats;
  return all;
}

DeltaLayers::DeltaLayers(const ModelConfig& config, std::int64_t rows, cuda::StreamHandle stream)
    : config_(config), stream_(stream) {
  const DeltaPlan& d = config.plan.delta;
  const auto buffer = [&](std::int64_t columns) {
    return columns == 0 ? cuda::Buffer()
                        : cuda::Buffer(rows * columns * kFloat, "recurrent layers of a chunk");
  };
  products_ = buffer(most_columns(config));
  convolved_ = buffer(d.channels());
  gates_ = buffer(2 * std::int64_t{d.value_heads});
  outputs_ = buffer(d.values());
  std::int64_t at = 0;
  for (const std::int64_t floats : config.plan.recurrent_floats()) {
    begin_.push_back(at);
    at += floats;
  }
}

cuda::DeltaLayer DeltaLayers::layer_of(const CudaModel::Delta& w) const {
  const DeltaPlan& d = config_.plan.delta;
  const auto numbers = [](const cuda::DeviceWeight& weight) {
    return static_cast<const float*>(weight.data);
  };
  return {.key_heads = d.key_heads,
          .value_heads = d.value_heads,
          .key_dim = d.key_dim,
          .value_dim = d.value_dim,
          .kernel = d.kernel,
          .tiled = d.tiled,
          .eps = static_cast<float>(config_.norm_eps),
          .conv = numbers(w.conv),
          .dt_bias = numbers(w.dt_bias),
          .rate = numbers(w.rate),
          .norm = numbers(w.norm)};
}

const float* DeltaLayers::run(int layer, const CudaModel::Layer& w, std::int64_t n,
                              std::span<const cuda::DeltaRows> rows, bool single,
                              const Product& product) const {
  const CudaModel::Delta& d = w.delta;
  const std::int64_t columns[] = {d.qkv.rows, d.z.rows, d.b.rows, d.a.rows};
  cuda::DeltaInput inputs[4];
  float* at = products_.as<float>();
  int part = 0;
  for (const cuda::DeviceWeight& matrix : d.joined) {
    product(matrix, at);
    for (std::int64_t column = 0; column < matrix.rows; column += columns[part++])
      inputs[part] = {at + column, matrix.rows};
    at += n * matrix.rows;
  }
  cuda::delta_layer(layer_of(d),
                    {.qkv = inputs[0],
                     .z = inputs[1],
                     .b = inputs[2],
                     .a = inputs[3],
                     .tokens = n,
                     .rows = rows.data(),
                     .row_count = static_cast<int>(rows.size()),
                     .single = single,
                     .state = begin_[static_cast<std::size_t>(layer)],
                     .convolved = convolved_.as<float>(),
                     .gates = gates_.as<float>(),
                     .o = outputs_.as<float>()},
                    stream_);
  return outputs_.as<float>();
}

void DeltaLayers::gate(const CudaModel::Layer& w, std::int64_t n, float* attention,
                       const Product& product) const {
  if (w.attention_gate.data == nullptr) return;
  product(w.attention_gate, products_.as<float>());
  cuda::gate_outputs(attention, products_.as<float>(), n * w.attention_gate.rows, stream_);
}

}  // namespace lode
