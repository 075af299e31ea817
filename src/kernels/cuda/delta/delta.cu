// SPDX-License-Identifier: Apache-2.0
// Three kernels, one behind the other:
//   convolve: a warp a token and head: convolution, SiLU, length 1 of q and k; decay and beta beside
//   recur:    a block some columns of one head's state, which stay in registers over all tokens of a sequence
//   finish:   a warp a token and head: norm, gain, SiLU of z; and the inputs that the next convolution needs
#include <cuda_pipeline.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/delta/delta.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

constexpr int kWarps = 4;                     // of a block of convolve and finish
constexpr int kConvolved = 8;                 // tokens of one of its warps
constexpr int kPerLane = kMostDeltaDim / 32;  // numbers of a head that a lane has
// A column of a state is shared by kLanes lanes, each of which has every kLanes-th four of its rows.
constexpr int kLanes = 8, kColumns = 2;  // columns of a lane
constexpr int kBlockColumns = 16, kRecurThreads = kBlockColumns / kColumns * kLanes;

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

__device__ __forceinline__ void set_gates(const DeltaLayer& layer, const DeltaCall& call, std::int64_t row,
                                          int lane) {
  float* const gates = call.gates + 2 * row * layer.value_heads;
  for (int head = lane; head < layer.value_heads; head += 32) {
    gates[head] =
        expf(layer.rate[head] * softplus(call.a.data[row * call.a.stride + head] + layer.dt_bias[head]));
    gates[layer.value_heads + head] = sigmoid(call.b.data[row * call.b.stride + head]);
  }
}

/// Heads of q, heads of k, heads of v, then the gates of all.
__host__ __device__ int units_of(const DeltaLayer& layer) {
  return 2 * layer.key_heads + layer.value_heads + 1;
}

/// kNumbers: of a head that a lane has.
template <int kNumbers, int kTaps>
__global__ __launch_bounds__(kWarps * 32) void convolve_kernel(const DeltaLayer layer, const DeltaCall call,
                                                               std::int64_t keys, std::int64_t channels) {
  release_successor();
  wait_for_predecessor();
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, heads = 2 * layer.key_heads;
  const DeltaRows rows = call.rows[blockIdx.z];
  const int begin = static_cast<int>(blockIdx.y) * kConvolved, end = min(rows.count, begin + kConvolved);
  if (unit >= units_of(layer)) return;
  const bool value = unit >= heads;
  const int dim = value ? layer.value_dim : layer.key_dim;
  const std::int64_t first = value ? 2 * keys + std::int64_t{unit - heads} * dim : std::int64_t{unit} * dim;
  for (int t = begin; t < end; ++t) {
    const std::int64_t row = rows.first + t;
    if (unit + 1 == units_of(layer)) {
      set_gates(layer, call, row, lane);
      continue;
    }
    float x[kNumbers], squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      const int i = lane + 32 * k;
      x[k] = i < dim ? convolved_at<kTaps>(layer, call, rows, t, channels, first + i) : 0.0f;
      squares = fmaf(x[k], x[k], squares);
    }
    float factor = 1.0f;
    if (!value) {
      constexpr float kLeast = 1e-6f;
      factor = (unit < layer.key_heads ? 1.0f / sqrtf(static_cast<float>(dim)) : 1.0f) /
               sqrtf(sum_over<32>(squares) + kLeast);
    }
#pragma unroll
    for (int k = 0; k < kNumbers; ++k)
      if (lane + 32 * k < dim) call.convolved[row * channels + first + lane + 32 * k] = x[k] * factor;
  }
}

/// What a block needs of some tokens. Rows of q and k behind key_dim are zeros.
template <int kFours>
struct Tile {
  static constexpr int kTokens = kFours > 4 ? 8 : 16, kDim = kFours * kLanes * 4;
  float q[kTokens][kDim], k[kTokens][kDim];
  float v[kTokens][kBlockColumns];
  float decay[kTokens], beta[kTokens];
};

/// Where a block's numbers of a sequence begin.
struct RecurPlace {
  const float *q, *k, *v, *decay, *beta;
  std::int64_t stride, gate_stride;
  int key_dim, columns;
  bool fours;  ///< all lies at 16-byte bounds
};

/// Of rows that lie at 16-byte bounds: a thread has the same fours of q and k of every token, and one of v.
template <int kFours>
__device__ __forceinline__ void bring_fours(Tile<kFours>& tile, const RecurPlace& at, int begin, int count) {
  constexpr int kOfKey = kFours * kLanes, kOfValue = kBlockColumns / 4;  // fours of a row
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int piece = thread; piece < 2 * kOfKey; piece += kRecurThreads) {
    const bool key = piece >= kOfKey;
    const int i = 4 * (key ? piece - kOfKey : piece);
    if (i >= at.key_dim) continue;
    const float* from = (key ? at.k : at.q) + begin * at.stride + i;
    float* to = key ? &tile.k[0][i] : &tile.q[0][i];
    for (int t = 0; t < count; ++t, from += at.stride, to += Tile<kFours>::kDim)
      __pipeline_memcpy_async(to, from, 16);
  }
  const int t = thread / kOfValue, i = thread % kOfValue * 4;
  if (t < count && i < at.columns)
    __pipeline_memcpy_async(&tile.v[t][i], at.v + (begin + t) * at.stride + i, 16);
}

/// Of other rows, number by number.
template <int kFours>
__device__ __forceinline__ void bring_numbers(Tile<kFours>& tile, const RecurPlace& at, int begin,
                                              int count) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const std::int64_t row = (std::int64_t{begin} + t) * at.stride;
#pragma unroll 1
    for (int i = thread; i < at.key_dim; i += kRecurThreads) {
      __pipeline_memcpy_async(&tile.q[t][i], at.q + row + i, 4);
      __pipeline_memcpy_async(&tile.k[t][i], at.k + row + i, 4);
    }
    if (thread < at.columns) __pipeline_memcpy_async(&tile.v[t][thread], at.v + row + thread, 4);
  }
}

/// Tokens [begin, begin + count) are on their way.
template <int kFours>
__device__ __forceinline__ void bring_tile(Tile<kFours>& tile, const RecurPlace& at, int begin, int count) {
  at.fours ? bring_fours(tile, at, begin, count) : bring_numbers(tile, at, begin, count);
  if (const int t = static_cast<int>(threadIdx.x); t < count) {
    __pipeline_memcpy_async(&tile.decay[t], at.decay + (begin + t) * at.gate_stride, 4);
    __pipeline_memcpy_async(&tile.beta[t], at.beta + (begin + t) * at.gate_stride, 4);
  }
  __pipeline_commit();
}

/// A lane's part of a state: rows 4 (kLanes f + lane) + 0..3 of its columns.
template <int kFours>
using StatePart = float[kColumns][kFours][4];

/// S = decay S + k (beta (v - decay S^T k))^T, o = S^T q, of the columns of kLanes lanes.
template <int kFours>
__device__ __forceinline__ void take_token(StatePart<kFours>& s, const Tile<kFours>& tile, int t, int lane,
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
template <int kFours, class F>
__device__ __forceinline__ void for_part(StatePart<kFours>& s, const DeltaLayer& layer, int lane, int column,
                                         const F& f) {
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

template <int kFours>
__global__ __launch_bounds__(kRecurThreads) void recur_kernel(const DeltaLayer layer, const DeltaCall call,
                                                              std::int64_t keys, std::int64_t channels,
                                                              bool fours) {
  __shared__ __align__(16) Tile<kFours> tiles[2];
  release_successor();
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof tiles / sizeof(float));
       i += kRecurThreads)
    reinterpret_cast<float*>(tiles)[i] = 0.0f;
  __syncthreads();
  wait_for_predecessor();
  const DeltaRows rows = call.rows[blockIdx.z];
  if (rows.count == 0) return;
  constexpr int kTokens = Tile<kFours>::kTokens;
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * kBlockColumns,
            lane = static_cast<int>(threadIdx.x) % kLanes,
            column = static_cast<int>(threadIdx.x) / kLanes * kColumns, all = first + column;
  const std::int64_t key = std::int64_t{layer.tiled ? head % layer.key_heads
                                                    : head / (layer.value_heads / layer.key_heads)} *
                           layer.key_dim,
                     values = channels - 2 * keys;
  const float* const at = call.convolved + rows.first * channels;
  const float* const gates = call.gates + 2 * std::int64_t{rows.first} * layer.value_heads + head;
  const RecurPlace place = {.q = at + key,
                            .k = at + keys + key,
                            .v = at + 2 * keys + std::int64_t{head} * layer.value_dim + first,
                            .decay = gates,
                            .beta = gates + layer.value_heads,
                            .stride = channels,
                            .gate_stride = 2 * std::int64_t{layer.value_heads},
                            .key_dim = layer.key_dim,
                            .columns = min(kBlockColumns, layer.value_dim - first),
                            .fours = fours};
  bring_tile(tiles[0], place, 0, min(kTokens, rows.count));
  const std::int64_t state =
      call.state + (layer.kernel - 1) * channels + std::int64_t{head} * layer.key_dim * layer.value_dim;
  StatePart<kFours> s = {};
  for_part<kFours>(s, layer, lane, all, [&](float& x, std::int64_t i) { x = rows.before[state + i]; });
  const bool puts = lane < kColumns && all + lane < layer.value_dim;
  float* to = call.o + rows.first * values + std::int64_t{head} * layer.value_dim + all + lane;
  for (int begin = 0, number = 0; begin < rows.count; begin += kTokens, ++number) {
    const int next = begin + kTokens;
    if (next < rows.count) bring_tile(tiles[(number + 1) % 2], place, next, min(kTokens, rows.count - next));
    next < rows.count ? __pipeline_wait_prior(1) : __pipeline_wait_prior(0);
    __syncthreads();
    const Tile<kFours>& tile = tiles[number % 2];
    const int count = min(kTokens, rows.count - begin);
#pragma unroll 4
    for (int t = 0; t < count; ++t, to += values) {
      float o[kColumns];
      take_token<kFours>(s, tile, t, lane, column, o);
      if (puts) *to = lane == 0 ? o[0] : o[1];
    }
    __syncthreads();  // the tile's place is the next but one's
  }
  for_part<kFours>(s, layer, lane, all, [&](float& x, std::int64_t i) { rows.after[state + i] = x; });
}

/// A head's output: root mean square 1, gains, SiLU of z.
__device__ __forceinline__ void finish_head(const DeltaLayer& layer, const DeltaCall& call, std::int64_t row,
                                            int head, int lane) {
  const std::int64_t first = std::int64_t{head} * layer.value_dim;
  float* const o = call.o + row * layer.value_heads * layer.value_dim + first;
  const float* const z = call.z.data + row * call.z.stride + first;
  float x[kPerLane], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    x[k] = lane + 32 * k < layer.value_dim ? o[lane + 32 * k] : 0.0f;
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

/// The first blocks finish heads, the others keep inputs, in as many strips as there are rows.
__global__ __launch_bounds__(kWarps * 32) void finish_kernel(const DeltaLayer layer, const DeltaCall call,
                                                             std::int64_t channels, int finishing,
                                                             int of_channels) {
  release_successor();
  wait_for_predecessor();
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (block < finishing) {
    const std::int64_t item = std::int64_t{block} * kWarps + thread / 32;
    if (item < call.tokens * layer.value_heads)
      finish_head(layer, call, item / layer.value_heads, static_cast<int>(item % layer.value_heads),
                  thread % 32);
    return;
  }
  const DeltaRows rows = call.rows[(block - finishing) / of_channels];
  const std::int64_t c = std::int64_t{(block - finishing) % of_channels} * kWarps * 32 + thread;
  if (rows.count > 0 && c < channels) keep_inputs(layer, call, rows, channels, c);
}

__global__ void gate_kernel(float* x, const float* gates, std::int64_t count) {
  release_successor();
  wait_for_predecessor();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) x[i] *= sigmoid(gates[i]);
}

unsigned blocks_for(std::int64_t count, std::int64_t of_block) {
  return static_cast<unsigned>((count + of_block - 1) / of_block);
}

}  // namespace

void delta_layer(const DeltaLayer& layer, const DeltaCall& call, StreamHandle stream) {
  if (layer.key_dim > kMostDeltaDim || layer.value_dim > kMostDeltaDim)
    throw RunError("expected recurrent heads of at most " + std::to_string(kMostDeltaDim) +
                   " numbers, found " + std::to_string(std::max(layer.key_dim, layer.value_dim)));
  if (call.tokens == 0 || call.row_count == 0) return;
  const std::int64_t keys = layer.keys(), channels = layer.channels();
  const auto rows = static_cast<unsigned>(call.row_count), heads = static_cast<unsigned>(layer.value_heads);
  const auto convolve = [&](auto kernel) {
    EarlyLaunch({blocks_for(units_of(layer), kWarps), blocks_for(call.tokens, kConvolved), rows}, kWarps * 32,
                0, 1, stream)(kernel, layer, call, keys, channels);
  };
  const bool usual = layer.kernel == 4 && std::max(layer.key_dim, layer.value_dim) <= 128;
  usual ? convolve(convolve_kernel<4, 4>) : convolve(convolve_kernel<kPerLane, 0>);
  const bool fours = layer.key_dim % 4 == 0 && layer.value_dim % 4 == 0;
  const auto recur = [&](auto kernel) {
    EarlyLaunch({blocks_for(layer.value_dim, kBlockColumns), heads, rows}, kRecurThreads, 0, 1, stream)(
        kernel, layer, call, keys, channels, fours);
  };
  const int needed = (layer.key_dim + 4 * kLanes - 1) / (4 * kLanes);
  needed <= 1   ? recur(recur_kernel<1>)
  : needed <= 2 ? recur(recur_kernel<2>)
  : needed <= 4 ? recur(recur_kernel<4>)
                : recur(recur_kernel<8>);
  const auto finishing = static_cast<int>(blocks_for(call.tokens * layer.value_heads, kWarps)),
             of_channels = static_cast<int>(blocks_for(channels, kWarps * 32));
  EarlyLaunch(dim3(static_cast<unsigned>(finishing + of_channels * call.row_count)), kWarps * 32, 0, 1,
              stream)(finish_kernel, layer, call, channels, finishing, of_channels);
}

void gate_outputs(float* x, const float* gates, std::int64_t count, StreamHandle stream) {
  constexpr int kThreads = 256;
  if (count > 0)
    EarlyLaunch(dim3(blocks_for(count, kThreads)), kThreads, 0, 1, stream)(gate_kernel, x, gates, count);
}

}  // namespace lode::cuda
