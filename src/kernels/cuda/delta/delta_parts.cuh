// SPDX-License-Identifier: Apache-2.0
// What both ways through a recurrent layer do alike (delta.cu, delta_step.cu), so that a state has the same bits on either.
#pragma once

#include "kernels/cuda/delta/delta.h"
#include "kernels/cuda/device/check.cuh"

namespace lode::cuda {

inline constexpr int kPerLane = kMostDeltaDim / 32;  // numbers of a head that a lane has
inline constexpr int kUsualDim = 128,
                     kUsualTaps = 4;  // of the models that have such layers: heads, and the convolution
/// A column of a state is shared by so many lanes, each of which has every kLanes-th four of its rows.
inline constexpr int kLanes = 8;

/// Sizes that kernels are compiled for.
inline bool is_usual(const DeltaLayer& layer) {
  return layer.kernel == kUsualTaps && layer.key_dim <= kUsualDim && layer.value_dim <= kUsualDim;
}
/// Of four rows of a state's column: how many a lane has.
inline int fours_of(const DeltaLayer& layer) {
  return (layer.key_dim + 4 * kLanes - 1) / (4 * kLanes);
}

/// Whether one launch takes a token of each sequence, and that launch. Needs clusters of blocks.
bool takes_single_tokens(const DeltaLayer& layer, const DeltaCall& call);
void take_single_tokens(const DeltaLayer& layer, const DeltaCall& call, StreamHandle stream);

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float softplus(float x) {
  return x > 20.0f ? x : log1pf(expf(x));
}
template <int kWidth>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// The input of a channel; t < 0: of an earlier call.
__device__ __forceinline__ float input_at(const DeltaLayer& layer, const DeltaCall& call,
                                          const DeltaRows& rows, int t, std::int64_t channels,
                                          std::int64_t c) {
  return t < 0 ? rows.before[call.state + (layer.kernel - 1 + t) * channels + c]
               : call.qkv.data[(rows.first + t) * call.qkv.stride + c];
}

/// kTaps: the layer's kernel where that is known, so that all loads are under way at once; or 0.
template <int kTaps>
__device__ __forceinline__ float convolved_at(const DeltaLayer& layer, const DeltaCall& call,
                                              const DeltaRows& rows, int t, std::int64_t channels,
                                              std::int64_t c) {
  const int taps = kTaps > 0 ? kTaps : layer.kernel;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < taps; ++i)
    sum = fmaf(layer.conv[c * taps + i], input_at(layer, call, rows, t - taps + 1 + i, channels, c), sum);
  return sum * sigmoid(sum);
}

/// Decay and beta of a head.
__device__ __forceinline__ float2 gates_of(const DeltaLayer& layer, const DeltaCall& call, std::int64_t row,
                                           int head) {
  return {expf(layer.rate[head] * softplus(call.a.data[row * call.a.stride + head] + layer.dt_bias[head])),
          sigmoid(call.b.data[row * call.b.stride + head])};
}

/// Of heads of q, heads of k and heads of v, in this order: where one's channels begin.
__device__ __forceinline__ std::int64_t first_channel(const DeltaLayer& layer, std::int64_t keys, int unit) {
  const int heads = 2 * layer.key_heads;
  return unit < heads ? std::int64_t{unit} * layer.key_dim
                      : 2 * keys + std::int64_t{unit - heads} * layer.value_dim;
}

/// A head of q, k or v behind convolution and SiLU; q and k of length 1, q divided by the root of their numbers besides.
/// Number lane + 32 k in x[k].
template <int kNumbers, int kTaps>
__device__ __forceinline__ void convolve_head(const DeltaLayer& layer, const DeltaCall& call,
                                              const DeltaRows& rows, int t, std::int64_t keys,
                                              std::int64_t channels, int unit, int lane,
                                              float (&x)[kNumbers]) {
  const bool value = unit >= 2 * layer.key_heads;
  const int dim = value ? layer.value_dim : layer.key_dim;
  const std::int64_t first = first_channel(layer, keys, unit);
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) {
    const int i = lane + 32 * k;
    x[k] = i < dim ? convolved_at<kTaps>(layer, call, rows, t, channels, first + i) : 0.0f;
    squares = fmaf(x[k], x[k], squares);
  }
  if (value) return;
  constexpr float kLeast = 1e-6f;
  const float factor = (unit < layer.key_heads ? 1.0f / sqrtf(static_cast<float>(dim)) : 1.0f) /
                       sqrtf(sum_over<32>(squares) + kLeast);
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) x[k] *= factor;
}

/// A lane's part of a state: rows 4 (kLanes f + lane) + 0..3 of its columns.
template <int kColumns, int kFours>
using StatePart = float[kColumns][kFours][4];

/// S = decay S + k (beta (v - decay S^T k))^T, o = S^T q, of the columns of kLanes lanes.
/// `tile` has token t's q and k, zeros behind key_dim, v, decay and beta.
template <int kColumns, int kFours, class Tile>
__device__ __forceinline__ void take_token(StatePart<kColumns, kFours>& s, const Tile& tile, int t, int lane,
                                           int column, float (&o)[kColumns]) {
  float k[kFours][4];
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const float4 four = *reinterpret_cast<const float4*>(&tile.k[t][4 * (kLanes * f + lane)]);
    k[f][0] = four.x, k[f][1] = four.y, k[f][2] = four.z, k[f][3] = four.w;
  }
  float add[kColumns];
  const float decay = tile.decay[t], beta = tile.beta[t];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      even = fmaf(s[c][f][0], k[f][0], even), odd = fmaf(s[c][f][1], k[f][1], odd);
      even = fmaf(s[c][f][2], k[f][2], even), odd = fmaf(s[c][f][3], k[f][3], odd);
    }
    add[c] = beta * fmaf(-decay, sum_over<kLanes>(even + odd), tile.v[t][column + c]);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const float4 q = *reinterpret_cast<const float4*>(&tile.q[t][4 * (kLanes * f + lane)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[c][f][i] = fmaf(k[f][i], add[c], decay * s[c][f][i]);
      even = fmaf(s[c][f][0], q.x, even), odd = fmaf(s[c][f][1], q.y, odd);
      even = fmaf(s[c][f][2], q.z, even), odd = fmaf(s[c][f][3], q.w, odd);
    }
    o[c] = sum_over<kLanes>(even + odd);
  }
}

/// f(part of the state, its place among a head's numbers) for each of a lane's.
template <int kColumns, int kFours, class F>
__device__ __forceinline__ void for_part(StatePart<kColumns, kFours>& s, const DeltaLayer& layer, int lane,
                                         int column, const F& f) {
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * (kLanes * four + lane) + i;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (row < layer.key_dim && column + c < layer.value_dim)
          f(s[c][four][i], std::int64_t{row} * layer.value_dim + column + c);
    }
  }
}

/// A head's output: root mean square 1, gains, SiLU of z. `made` [value_dim] may be where it goes.
__device__ __forceinline__ void finish_head(const DeltaLayer& layer, const DeltaCall& call, std::int64_t row,
                                            int head, const float* made, int lane) {
  const std::int64_t first = std::int64_t{head} * layer.value_dim;
  float* const o = call.o + row * layer.value_heads * layer.value_dim + first;
  const float* const z = call.z.data + row * call.z.stride + first;
  float x[kPerLane], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    x[k] = lane + 32 * k < layer.value_dim ? made[lane + 32 * k] : 0.0f;
    squares = fmaf(x[k], x[k], squares);
  }
  const float inverse = 1.0f / sqrtf(sum_over<32>(squares) / static_cast<float>(layer.value_dim) + layer.eps);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int i = lane + 32 * k;
    if (i < layer.value_dim) o[i] = x[k] * inverse * layer.norm[i] * (z[i] * sigmoid(z[i]));
  }
}

/// Rising, so that a state may be written where it was read.
__device__ __forceinline__ void keep_inputs(const DeltaLayer& layer, const DeltaCall& call,
                                            const DeltaRows& rows, std::int64_t channels, std::int64_t c) {
  const int past = layer.kernel - 1;
  for (int i = 0; i < past; ++i)
    rows.after[call.state + i * channels + c] =
        input_at(layer, call, rows, rows.count - past + i, channels, c);
}

}  // namespace lode::cuda
