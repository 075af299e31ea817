// SPDX-License-Identifier: Apache-2.0
// One token of each sequence in one launch: a block a value head, whose columns of the state all its threads share. Warps
// convolve q, k and v and make the gates while the state comes; then every thread takes the token as in delta.cu.
//
// Value heads of one key head are a cluster: each convolves q and k for itself, and the inputs that the next convolution
// needs may be written where they were read once all have read them.
#include <algorithm>

#include "kernels/cuda/delta/delta_parts.cuh"
#include "kernels/cuda/device/cta_cluster_mailbox.cuh"
#include "kernels/cuda/device/hopper.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel is empty there, and what it uses is not
#endif

namespace lode::cuda {

namespace {

constexpr int kColumns = 2, kThreads = kUsualDim / kColumns * kLanes;  // columns of a lane
constexpr int kMostRatio = 8;  // value heads of a key head: blocks of a cluster that every GPU promises
constexpr int kNumbers = kUsualDim / 32;

/// A token, as take_token has it.
template <int kFours>
struct Token {
  float q[1][kFours * kLanes * 4], k[1][kFours * kLanes * 4];
  float v[1][kUsualDim];
  float decay[1], beta[1];
};

template <int kFours>
__global__ __launch_bounds__(kThreads) void step_kernel(const DeltaLayer layer, const DeltaCall call,
                                                        std::int64_t keys, std::int64_t channels) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(16) Token<kFours> token;
  __shared__ float made[kUsualDim];
  release_successor();
  wait_for_predecessor();
  const DeltaRows rows = call.rows[blockIdx.z];
  if (rows.count == 0) return;  // so do all blocks of the cluster
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32,
            key_head = static_cast<int>(blockIdx.y), ratio = static_cast<int>(gridDim.x),
            rank = static_cast<int>(blockIdx.x),
            head = layer.tiled ? rank * layer.key_heads + key_head : key_head * ratio + rank,
            lane = thread % kLanes, column = thread / kLanes * kColumns;
  const std::int64_t state =
      call.state + (layer.kernel - 1) * channels + std::int64_t{head} * layer.key_dim * layer.value_dim;
  StatePart<kColumns, kFours> s = {};
  for_part<kColumns, kFours>(s, layer, lane, column,
                             [&](float& x, std::int64_t i) { x = rows.before[state + i]; });
  const int units[] = {key_head, layer.key_heads + key_head, 2 * layer.key_heads + head};
  if (warp < 3) {
    float* const to = warp == 0 ? token.q[0] : warp == 1 ? token.k[0] : token.v[0];
    const int room = warp < 2 ? kFours * kLanes * 4 : kUsualDim;
    float x[kNumbers];
    convolve_head<kNumbers, kUsualTaps>(layer, call, rows, 0, keys, channels, units[warp], thread % 32, x);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k)
      if (const int i = thread % 32 + 32 * k; i < room) to[i] = x[k];  // zeros behind the head's numbers
  } else if (thread == 3 * 32) {
    const float2 gates = gates_of(layer, call, rows.first, head);
    token.decay[0] = gates.x, token.beta[0] = gates.y;
  }
  __syncthreads();
  arrive_in_cluster();  // all that was read of `before` has been used: it stands in shared memory
  float o[kColumns];
  take_token<kColumns, kFours>(s, token, 0, lane, column, o);
  if (lane < kColumns) made[column + lane] = lane == 0 ? o[0] : o[1];
  for_part<kColumns, kFours>(s, layer, lane, column,
                             [&](float& x, std::int64_t i) { rows.after[state + i] = x; });
  __syncthreads();
  wait_for_cluster();
  if (warp == 0) finish_head(layer, call, rows.first, head, made, thread);
  // Channels of v are this block's own, those of q and k the first one's.
  for (int unit = rank == 0 ? 0 : 2; unit < 3; ++unit) {
    const int dim = unit < 2 ? layer.key_dim : layer.value_dim;
    if (warp / 4 == unit + 1 && thread % 128 < dim)
      keep_inputs(layer, call, rows, channels, first_channel(layer, keys, units[unit]) + thread % 128);
  }
#endif
}

int ratio_of(const DeltaLayer& layer) {
  return layer.value_heads / layer.key_heads;
}

}  // namespace

bool takes_single_tokens(const DeltaLayer& layer, const DeltaCall& call) {
  return call.single && has_clusters() && is_usual(layer) && ratio_of(layer) <= kMostRatio;
}

void take_single_tokens(const DeltaLayer& layer, const DeltaCall& call, StreamHandle stream) {
  const int ratio = ratio_of(layer);
  const dim3 grid(static_cast<unsigned>(ratio), static_cast<unsigned>(layer.key_heads),
                  static_cast<unsigned>(call.row_count));
  const auto step = [&](auto kernel) {
    EarlyLaunch(grid, kThreads, 0, ratio, stream)(kernel, layer, call, layer.keys(), layer.channels());
  };
  const int needed = fours_of(layer);
  needed <= 1 ? step(step_kernel<1>) : needed <= 2 ? step(step_kernel<2>) : step(step_kernel<4>);
}

}  // namespace lode::cuda
