// SPDX-License-Identifier: Apache-2.0
// The steps of a layer as a matrix-vector kernel sees them. The rows of a step's matrices come in pairs that
// one thread finishes together: the two halves of a rotated pair, gate and up of one channel, or two
// neighbours. A step says which two rows a pair is, and what becomes of their two products.
#pragma once

#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// Input rows of a step; with a gain, its rows are rms_norm(x).
struct StepInput {
  const float* x = nullptr;  // [n, cols]
  Vector gain;               // [cols]
  float eps = 0.0f;
  std::int64_t n = 0, cols = 0;
};

template <class W>
struct RowPair {
  const W* a = nullptr;
  const W* b = nullptr;  ///< null where the matrix has an odd number of rows
};

/// y = x w^T + bias (+ y)
template <class W>
struct PlainStep {
  using Weight = W;
  const W* w = nullptr;  // [rows, cols]
  std::int64_t rows = 0, cols = 0;
  Vector bias;         // [rows]
  float* y = nullptr;  // [n, rows]
  bool add = false;

  __host__ __device__ std::int64_t pairs() const { return (rows + 1) / 2; }
  __device__ RowPair<W> pair(std::int64_t p) const {
    const W* a = w + 2 * p * cols;
    return {a, 2 * p + 1 < rows ? a + cols : nullptr};
  }
  struct Before {
    float a = 0.0f, b = 0.0f;  ///< y, where it is added to
    float bias_a = 0.0f, bias_b = 0.0f;
  };
  __device__ Before before(std::int64_t p, std::int64_t n) const {
    const bool both = 2 * p + 1 < rows;
    Before at;
    at.bias_a = bias.or_zero(2 * p);
    if (both) at.bias_b = bias.or_zero(2 * p + 1);
    if (add) at.a = y[n * rows + 2 * p];
    if (add && both) at.b = y[n * rows + 2 * p + 1];
    return at;
  }
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b, const Before& at) const {
    float* to = y + n * rows + 2 * p;
    to[0] = add ? at.a + (a + at.bias_a) : a + at.bias_a;
    if (2 * p + 1 < rows) to[1] = add ? at.b + (b + at.bias_b) : b + at.bias_b;
  }
};

/// In every lane, in a fixed order.
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// tanh's approximation of GELU.
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float activate(const Activation& a, float gate, float up) {
  if (a.gelu) return gelu_tanh(gate) * up;
  const float g = gate > a.limit ? a.limit : gate,  // as written, since NaN stays
      u = up > a.limit    ? a.limit
          : up < -a.limit ? -a.limit
                          : up;
  return g / (1.0f + expf(-a.slope * g)) * (u + a.offset);
}

/// act = activation(gate, up)
template <class W>
struct GateUpStep {
  using Weight = W;
  const W *gate = nullptr, *up = nullptr;  // [rows, cols]
  std::int64_t rows = 0, cols = 0;
  Vector gate_bias, up_bias;  // [rows]
  void* act = nullptr;        // [n, rows]
  DType act_type = DType::f32;
  Activation activation;

  __host__ __device__ std::int64_t pairs() const { return rows; }
  __device__ RowPair<W> pair(std::int64_t p) const { return {gate + p * cols, up + p * cols}; }
  struct Before {
    float gate_bias = 0.0f, up_bias = 0.0f;
  };
  __device__ Before before(std::int64_t p, std::int64_t) const {
    return {gate_bias.or_zero(p), up_bias.or_zero(p)};
  }
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b, const Before& at) const {
    a += at.gate_bias;
    b += at.up_bias;
    store_as(act, act_type, n * rows + p, activate(activation, a, b));
  }
};

/// Queries, keys and values; RoPE; keys and values to their rows of the store.
template <class W>
struct QkvStep {
  using Weight = W;
  const W *q = nullptr, *k = nullptr, *v = nullptr;  // [heads * d, cols]
  std::int64_t cols = 0;
  Vector q_bias, k_bias, v_bias;
  int query_heads = 0, kv_heads = 0, half = 0;  // half: d / 2
  const float* frequencies = nullptr;           // [d/2]
  int turning = 0;                              ///< pairs of a head that turn; the others stay as they are
  float rope_scale = 1.0f;
  float *q_out = nullptr, *q_unrotated = nullptr;                    // [N, Hq, d]
  float *k_out = nullptr, *k_unrotated = nullptr, *v_out = nullptr;  // [N, Hkv, d]
  const QueryToken* tokens = nullptr;
  const char* const* bases = nullptr;
  std::int64_t layer_offset = 0;
  KvLayout layout;

  __host__ __device__ std::int64_t pairs() const { return std::int64_t{query_heads + 2 * kv_heads} * half; }
  __device__ RowPair<W> pair(std::int64_t p) const {
    const Place at = place(p);
    const W* w = at.kind == kQuery ? q : at.kind == kKey ? k : v;
    const W* a = w + (std::int64_t{at.head} * 2 * half + at.i) * cols;
    return {a, a + half * cols};
  }
  struct Before {
    float bias_a = 0.0f, bias_b = 0.0f;
    float sine = 0.0f, cosine = 1.0f;  ///< of the token's angle, scaled
    char* row = nullptr;               ///< in the store; null for a query
  };
  __device__ Before before(std::int64_t p, std::int64_t n) const {
    const Place at = place(p);
    const Vector& bias = at.kind == kQuery ? q_bias : at.kind == kKey ? k_bias : v_bias;
    const std::int64_t row = std::int64_t{at.head} * 2 * half + at.i;
    Before known;
    known.bias_a = bias.or_zero(row);
    known.bias_b = bias.or_zero(row + half);
    const QueryToken token = tokens[n];
    if (at.kind != kValue && at.i < turning) {
      // The angle is a float32 product and is not fused into anything, as in the reference model.
      sincosf(__fmul_rn(static_cast<float>(token.position), frequencies[at.i]), &known.sine, &known.cosine);
      known.sine = __fmul_rn(known.sine, rope_scale);
      known.cosine = __fmul_rn(known.cosine, rope_scale);
    }
    if (at.kind != kQuery) {
      known.row = const_cast<char*>(bases[token.sequence]) + layer_offset +
                  layout.key_offset(at.head, token.position) +
                  (at.kind == kValue ? layout.value_offset() : 0);
    }
    return known;
  }
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b, const Before& known) const {
    const Place at = place(p);
    a += known.bias_a;
    b += known.bias_b;
    const bool query = at.kind == kQuery;
    float* plain = query ? q_unrotated : at.kind == kKey ? k_unrotated : v_out;
    put(plain, query ? query_heads : kv_heads, at, n, a, b);
    if (at.kind != kValue) {
      const float turned = fmaf(a, known.cosine, -__fmul_rn(b, known.sine));
      b = fmaf(b, known.cosine, __fmul_rn(a, known.sine));
      a = turned;
      put(query ? q_out : k_out, query ? query_heads : kv_heads, at, n, a, b);
    }
    if (query) return;
    store_as(known.row, layout.type, at.i, a);
    store_as(known.row, layout.type, at.i + half, b);
  }

 private:
  enum Kind { kQuery, kKey, kValue };
  struct Place {
    Kind kind;
    int head, i;  ///< head within its kind; first component of the pair
  };
  __device__ Place place(std::int64_t p) const {
    const int head = static_cast<int>(p) / half, i = static_cast<int>(p) % half;
    if (head < query_heads) return {kQuery, head, i};
    if (head < query_heads + kv_heads) return {kKey, head - query_heads, i};
    return {kValue, head - query_heads - kv_heads, i};
  }
  __device__ void put(float* to, int heads, const Place& at, std::int64_t n, float a, float b) const {
    if (to == nullptr) return;
    float* row = to + (n * heads + at.head) * 2 * half + at.i;
    row[0] = a;
    row[half] = b;
  }
};

}  // namespace lode::cuda
