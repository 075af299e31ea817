// SPDX-License-Identifier: Apache-2.0
// Recurrent layers of the played GPU, number by number.
#include "kernels/cuda/delta/delta.h"

#include <cmath>
#include <vector>

#include "gpu_fake/play.h"

namespace lode::cuda {

namespace {

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

struct Sequence {
  const DeltaLayer& layer;
  const DeltaCall& call;
  const DeltaRows& rows;

  float input(std::int64_t t, std::int64_t c) const {
    return t < 0 ? rows.before[call.state + (layer.kernel - 1 + t) * layer.channels() + c]
                 : call.qkv.data[(rows.first + t) * call.qkv.stride + c];
  }

  /// Channels after convolution and SiLU; q and k of length 1.
  std::vector<float> convolved(std::int64_t t) const {
    std::vector<float> x(static_cast<std::size_t>(layer.channels()));
    for (std::int64_t c = 0; c < layer.channels(); ++c) {
      float sum = 0;
      for (int i = 0; i < layer.kernel; ++i)
        sum += layer.conv[c * layer.kernel + i] * input(t - layer.kernel + 1 + i, c);
      x[static_cast<std::size_t>(c)] = sum * sigmoid(sum);
    }
    for (int h = 0; h < 2 * layer.key_heads; ++h) {
      float* const head = x.data() + std::int64_t{h} * layer.key_dim;
      float squares = 0;
      for (int i = 0; i < layer.key_dim; ++i) squares += head[i] * head[i];
      const float factor = (h < layer.key_heads ? 1 / std::sqrt(static_cast<float>(layer.key_dim)) : 1.0f) /
                           std::sqrt(squares + 1e-6f);
      for (int i = 0; i < layer.key_dim; ++i) head[i] *= factor;
    }
    return x;
  }

  void take(std::int64_t t, int head, const std::vector<float>& x, float* state) const {
    const std::int64_t row = rows.first + t, kd = layer.key_dim, vd = layer.value_dim,
                       key = kd * (layer.tiled ? head % layer.key_heads
                                               : head / (layer.value_heads / layer.key_heads));
    const float a = call.a.data[row * call.a.stride + head] + layer.dt_bias[head],
                decay = std::exp(layer.rate[head] * (a > 20 ? a : std::log1p(std::exp(a)))),
                beta = sigmoid(call.b.data[row * call.b.stride + head]);
    const float *const q = x.data() + key, *const k = q + layer.keys(),
                       *const v = x.data() + 2 * layer.keys() + head * vd;
    for (std::int64_t c = 0; c < vd; ++c) {
      float known = 0, o = 0;
      for (std::int64_t i = 0; i < kd; ++i) known += state[i * vd + c] * k[i];
      const float add = beta * (v[c] - decay * known);
      for (std::int64_t i = 0; i < kd; ++i) {
        state[i * vd + c] = decay * state[i * vd + c] + k[i] * add;
        o += state[i * vd + c] * q[i];
      }
      call.o[row * layer.values() + head * vd + c] = o;
    }
    finish(row, head);
  }

  void finish(std::int64_t row, int head) const {
    const std::int64_t vd = layer.value_dim;
    float* const o = call.o + row * layer.values() + head * vd;
    const float* const z = call.z.data + row * call.z.stride + head * vd;
    float squares = 0;
    for (std::int64_t c = 0; c < vd; ++c) squares += o[c] * o[c];
    const float inverse = 1 / std::sqrt(squares / static_cast<float>(vd) + layer.eps);
    for (std::int64_t c = 0; c < vd; ++c) o[c] *= inverse * layer.norm[c] * z[c] * sigmoid(z[c]);
  }

  void run() const {
    const std::int64_t past = layer.kernel - 1, channels = layer.channels(),
                       numbers = std::int64_t{layer.key_dim} * layer.value_dim;
    std::vector<float> states(rows.before + call.state + past * channels,
                              rows.before + call.state + past * channels + numbers * layer.value_heads);
    for (std::int64_t t = 0; t < rows.count; ++t) {
      const std::vector<float> x = convolved(t);
      for (int head = 0; head < layer.value_heads; ++head) take(t, head, x, states.data() + head * numbers);
    }
    for (std::int64_t i = 0; i < past; ++i)
      for (std::int64_t c = 0; c < channels; ++c)
        rows.after[call.state + i * channels + c] = input(rows.count - past + i, c);
    std::copy(states.begin(), states.end(), rows.after + call.state + past * channels);
  }
};

}  // namespace

void delta_layer(const DeltaLayer& layer, const DeltaCall& call, StreamHandle stream) {
  enqueue(stream, [=] {
    for (int i = 0; i < call.row_count; ++i)
      if (call.rows[i].count > 0) Sequence{layer, call, call.rows[i]}.run();
  });
}

void gate_outputs(float* x, const float* gates, std::int64_t count, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < count; ++i) x[i] *= sigmoid(gates[i]);
  });
}

}  // namespace lode::cuda
