// SPDX-License-Identifier: Apache-2.0
// Three kernels, one behind the other:
//   convolve: a warp a token and head: convolution, SiLU, length 1 of q and k; decay and beta beside
//   recur:    a block some columns of one head's state, which stay in registers over all tokens of a sequence
//   finish:   a warp a token and head: norm, gain, SiLU of z; and the inputs that the next convolution needs
// Where no sequence has more than one token, one kernel does all three (delta_step.cu).
#include <cuda_pipeline.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/delta/delta_parts.cuh"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

constexpr int kWarps = 4;          // of a block of convolve and finish
constexpr int kConvolved = 8;      // tokens of one of its warps
constexpr int kBlockColumns = 16;  // of recur
/// A lane has one column: with two, q and k are read half as often, but a processor has too few warps to wait with.
constexpr int kRecurThreads = kBlockColumns * kLanes;

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
  const int dim = unit >= heads ? layer.value_dim : layer.key_dim;
  const std::int64_t first = first_channel(layer, keys, unit);
  for (int t = begin; t < end; ++t) {
    const std::int64_t row = rows.first + t;
    if (unit + 1 == units_of(layer)) {
      float* const gates = call.gates + 2 * row * layer.value_heads;
      for (int head = lane; head < layer.value_heads; head += 32) {
        const float2 of_head = gates_of(layer, call, row, head);
        gates[head] = of_head.x, gates[layer.value_heads + head] = of_head.y;
      }
      continue;
    }
    float x[kNumbers];
    convolve_head<kNumbers, kTaps>(layer, call, rows, t, keys, channels, unit, lane, x);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k)
      if (lane + 32 * k < dim) call.convolved[row * channels + first + lane + 32 * k] = x[k];
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
            lane = static_cast<int>(threadIdx.x) % kLanes, column = static_cast<int>(threadIdx.x) / kLanes,
            all = first + column;
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
  StatePart<1, kFours> s = {};
  for_part<1, kFours>(s, layer, lane, all, [&](float& x, std::int64_t i) { x = rows.before[state + i]; });
  const bool puts = lane == 0 && all < layer.value_dim;
  float* to = call.o + rows.first * values + std::int64_t{head} * layer.value_dim + all;
  for (int begin = 0, number = 0; begin < rows.count; begin += kTokens, ++number) {
    const int next = begin + kTokens;
    if (next < rows.count) bring_tile(tiles[(number + 1) % 2], place, next, min(kTokens, rows.count - next));
    next < rows.count ? __pipeline_wait_prior(1) : __pipeline_wait_prior(0);
    __syncthreads();
    const Tile<kFours>& tile = tiles[number % 2];
    const int count = min(kTokens, rows.count - begin);
#pragma unroll 4
    for (int t = 0; t < count; ++t, to += values) {
      float o[1];
      take_token<1, kFours>(s, tile, t, lane, column, o);
      if (puts) *to = o[0];
    }
    __syncthreads();  // the tile's place is the next but one's
  }
  for_part<1, kFours>(s, layer, lane, all, [&](float& x, std::int64_t i) { rows.after[state + i] = x; });
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
                  call.o + item * layer.value_dim, thread % 32);
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
  if (takes_single_tokens(layer, call)) return take_single_tokens(layer, call, stream);
  const auto rows = static_cast<unsigned>(call.row_count), heads = static_cast<unsigned>(layer.value_heads);
  const auto convolve = [&](auto kernel) {
    EarlyLaunch({blocks_for(units_of(layer), kWarps), blocks_for(call.tokens, kConvolved), rows}, kWarps * 32,
                0, 1, stream)(kernel, layer, call, keys, channels);
  };
  is_usual(layer) ? convolve(convolve_kernel<kUsualDim / 32, kUsualTaps>)
                  : convolve(convolve_kernel<kPerLane, 0>);
  const bool fours = layer.key_dim % 4 == 0 && layer.value_dim % 4 == 0;
  const auto recur = [&](auto kernel) {
    EarlyLaunch({blocks_for(layer.value_dim, kBlockColumns), heads, rows}, kRecurThreads, 0, 1, stream)(
        kernel, layer, call, keys, channels, fours);
  };
  const int needed = fours_of(layer);
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
