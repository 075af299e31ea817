// SPDX-License-Identifier: Apache-2.0
// A recurrent layer between its products (Gated DeltaNet, arXiv 2412.06464, equation 10): convolution, gates, the delta
// rule and the norm of what comes out. Tokens are taken one by one, so that a state has the same bits however its tokens
// were cut into calls, and whoever else is in them.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Numbers that a key or a value of a head may have.
inline constexpr int kMostDeltaDim = 256;

/// Sizes of a layer, and its small weights, which are float32 on the GPU.
struct DeltaLayer {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int kernel = 0;      ///< tokens that the convolution sees
  bool tiled = false;  ///< value head h has key head h % key_heads, not h / (value_heads / key_heads)
  float eps = 1e-6f;   ///< of the norm of a head's output
  const float* conv = nullptr;                      // [channels, kernel]
  const float *dt_bias = nullptr, *rate = nullptr;  // [Hv]; the rate of decay, below 0
  const float* norm = nullptr;                      // [value_dim]

  std::int64_t keys() const { return std::int64_t{key_heads} * key_dim; }
  std::int64_t values() const { return std::int64_t{value_heads} * value_dim; }
  std::int64_t channels() const { return 2 * keys() + values(); }
};

/// Consecutive tokens of one sequence in a step, and where the states of all layers lie before and after them.
struct DeltaRows {
  const float* before = nullptr;
  float* after = nullptr;  ///< may be `before`
  std::int32_t first = 0, count = 0;
};

/// Rows of numbers, `stride` apart.
struct DeltaInput {
  const float* data = nullptr;
  std::int64_t stride = 0;
};

struct DeltaCall {
  DeltaInput qkv, z, b, a;  // [T, channels], [T, values], [T, Hv] twice: products of the layer's input
  std::int64_t tokens = 0;  // T
  const DeltaRows* rows = nullptr;  // [row_count] on the GPU; those without tokens are passed over
  int row_count = 0;
  bool single = false;  ///< no row has more than one token
  /// Where the layer's state begins among those of all layers: inputs [kernel - 1, channels], then [Hv, key_dim,
  /// value_dim].
  std::int64_t state = 0;
  float* convolved = nullptr;  // [T, channels] working memory
  float* gates = nullptr;      // [T, 2, Hv] working memory: decay, beta
  float* o = nullptr;          // [T, values]
};

/// o, and the states after the tokens.
void delta_layer(const DeltaLayer& layer, const DeltaCall& call, StreamHandle stream);

/// x[i] *= sigmoid(gates[i])
void gate_outputs(float* x, const float* gates, std::int64_t count, StreamHandle stream);

}  // namespace lode::cuda
