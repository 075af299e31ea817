// SPDX-License-Identifier: Apache-2.0
// The steps of a layer as a matrix-vector kernel sees them. The rows of a step's matrices come in pairs that
// one thread finishes together: the two halves of a rotated pair, gate and up of one channel, or two
// neighbours. A step says which two rows a pair is, and what becomes of their two products.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear.h"

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
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b) const {
    put(2 * p, n, a);
    if (2 * p + 1 < rows) put(2 * p + 1, n, b);
  }
  __device__ void put(std::int64_t row, std::int64_t n, float value) const {
    float* to = y + n * rows + row;
    value += bias.or_zero(row);
    *to = add ? *to + value : value;
  }
};

/// act = silu(gate) * up
template <class W>
struct GateUpStep {
  using Weight = W;
  const W *gate = nullptr, *up = nullptr;  // [rows, cols]
  std::int64_t rows = 0, cols = 0;
  Vector gate_bias, up_bias;  // [rows]
  void* act = nullptr;        // [n, rows]
  DType act_type = DType::f32;

  __host__ __device__ std::int64_t pairs() const { return rows; }
  __device__ RowPair<W> pair(std::int64_t p) const { return {gate + p * cols, up + p * cols}; }
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b) const {
    a += gate_bias.or_zero(p);
    b += up_bias.or_zero(p);
    store_as(act, act_type, n * rows + p, a / (1.0f + expf(-a)) * b);
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
  float rope_scale = 1.0f;
  float *q_out = nullptr, *q_unrotated = nullptr;                    // [N, Hq, d]
  float *k_out = nullptr, *k_unrotated = nullptr, *v_out = nullptr;  // [N, Hkv, d]
  const QueryToken* tokens = nullptr;
  const char* const* bases = nullptr;
  std::int64_t layer_offset = 0;
  KvLayout layout;

  __host__ __device__ std::int64_t pairs() const { return std::int64_t{query_heads + 2 * kv_heads} * half; }
  __device__ RowPair<W> pair(std::int64_t p) const {
    int head = static_cast<int>(p / half);
    const std::int64_t i = p % half;
    const W* w = q;
    if (head >= query_heads + kv_heads) {
      w = v;
      head -= query_heads + kv_heads;
    } else if (head >= query_heads) {
      w = k;
      head -= query_heads;
    }
    const W* a = w + (std::int64_t{head} * 2 * half + i) * cols;
    return {a, a + half * cols};
  }
  __device__ void finish(std::int64_t p, std::int64_t n, float a, float b) const {
    const int head = static_cast<int>(p / half), i = static_cast<int>(p % half);
    if (head < query_heads)
      finish_query(head, i, n, a, b);
    else if (head < query_heads + kv_heads)
      finish_key(head - query_heads, i, n, a, b);
    else
      finish_value(head - query_heads - kv_heads, i, n, a, b);
  }

  /// Turns (a, b), components i and i + d/2, to the token's position.
  __device__ void rotate(int i, std::int64_t n, float& a, float& b) const {
    // The angle is a float32 product and is not fused into anything, as in the reference model.
    const float angle = __fmul_rn(static_cast<float>(tokens[n].position), frequencies[i]);
    float s, c;
    sincosf(angle, &s, &c);
    s = __fmul_rn(s, rope_scale);
    c = __fmul_rn(c, rope_scale);
    const float rotated = fmaf(a, c, -__fmul_rn(b, s));
    b = fmaf(b, c, __fmul_rn(a, s));
    a = rotated;
  }
  __device__ void put(float* to, int heads, int head, int i, std::int64_t n, float a, float b) const {
    if (to == nullptr) return;
    float* at = to + (n * heads + head) * 2 * half + i;
    at[0] = a;
    at[half] = b;
  }
  __device__ void append(std::int64_t offset, int i, std::int64_t n, float a, float b) const {
    char* at = const_cast<char*>(bases[tokens[n].sequence]) + layer_offset + offset;
    store_as(at, layout.type, i, a);
    store_as(at, layout.type, i + half, b);
  }
  __device__ void finish_query(int head, int i, std::int64_t n, float a, float b) const {
    const std::int64_t row = std::int64_t{head} * 2 * half + i;
    a += q_bias.or_zero(row);
    b += q_bias.or_zero(row + half);
    put(q_unrotated, query_heads, head, i, n, a, b);
    rotate(i, n, a, b);
    put(q_out, query_heads, head, i, n, a, b);
  }
  __device__ void finish_key(int head, int i, std::int64_t n, float a, float b) const {
    const std::int64_t row = std::int64_t{head} * 2 * half + i;
    a += k_bias.or_zero(row);
    b += k_bias.or_zero(row + half);
    put(k_unrotated, kv_heads, head, i, n, a, b);
    rotate(i, n, a, b);
    put(k_out, kv_heads, head, i, n, a, b);
    append(layout.key_offset(head, tokens[n].position), i, n, a, b);
  }
  __device__ void finish_value(int head, int i, std::int64_t n, float a, float b) const {
    const std::int64_t row = std::int64_t{head} * 2 * half + i;
    a += v_bias.or_zero(row);
    b += v_bias.or_zero(row + half);
    put(v_out, kv_heads, head, i, n, a, b);
    append(layout.key_offset(head, tokens[n].position) + layout.value_offset(), i, n, a, b);
  }
};

}  // namespace lode::cuda
