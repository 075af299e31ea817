// SPDX-License-Identifier: Apache-2.0
#include <cuda_fp16.h>

#include <cmath>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/squeezed/score_clusters.h"
#include "kernels/select/centroid_scores.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLargestLogit = 1e30f;  // kernels/exponentials.h
constexpr float kLowestExponent = -87.0f;

unsigned blocks_for(std::int64_t items) {
  return static_cast<unsigned>((items + kThreads - 1) / kThreads);
}

__device__ float number(const void* from, DType type, std::int64_t at) {
  if (type == DType::f32) return static_cast<const float*>(from)[at];
  if (type == DType::f16) return __half2float(static_cast<const __half*>(from)[at]);
  return static_cast<float>(static_cast<const signed char*>(from)[at]);
}

__global__ void widen_kernel(const void* from, DType type, const float* scales, std::int64_t count,
                             std::int64_t width, float* to) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = number(from, type, i) * (scales != nullptr ? scales[i / width] : 1.0f);
}

__global__ void squares_kernel(const float* q, std::int64_t count, std::int64_t d, std::int64_t planes,
                               float* squares) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t row = i / planes, j = i % planes;
  const float one = q[row * d + j], other = j + planes < d ? q[row * d + j + planes] : 0.0f;
  squares[i] = one * one + other * other;
}

/// The same sum whatever the order in which threads end.
template <class T, class Join>
__device__ T joined(T own, const Join& join) {
  __shared__ T parts[kWarps];
  for (int o = 16; o > 0; o /= 2) own = join(own, __shfl_xor_sync(~0u, own, o));
  __syncthreads();  // those of the call before have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
  __syncthreads();
  T all = parts[0];
  for (int i = 1; i < kWarps; ++i) all = join(all, parts[i]);
  return all;
}

__device__ float with_spread(float z, float variance, float keys) {
  // Where it is no number, or none that a float holds, it is the largest.
  const float most = lode::kLargestSpread * lode::kLargestSpread,
              s = sqrtf(variance < most ? variance : most), b = fminf(s, sqrtf(2.0f * logf(keys)));
  return z + b * (s - 0.5f * b);
}

/// A block a row.
__global__ void __launch_bounds__(kThreads) weigh_kernel(const NodeWeights p) {
  float* const z = p.z + blockIdx.x * p.nodes;
  const float* const variances = p.variances != nullptr ? p.variances + blockIdx.x * p.nodes : nullptr;
  const auto keys_of = [&](std::int64_t i) { return static_cast<float>(p.first[i + 1] - p.first[i]); };
  float peak = -kLargestLogit;
  int numbers = 1;
  for (std::int64_t i = threadIdx.x; i < p.nodes; i += kThreads) {
    const float own = variances != nullptr ? with_spread(z[i], variances[i], keys_of(i)) : z[i];
    if (own != own) numbers = 0;
    z[i] = fminf(fmaxf(own, -kLargestLogit), kLargestLogit);
    peak = fmaxf(peak, z[i]);
  }
  peak = joined(peak, [](float a, float b) { return fmaxf(a, b); });
  numbers = joined(numbers, [](int a, int b) { return min(a, b); });
  double sum = 0.0, keys = p.first[p.nodes];
  for (std::int64_t i = threadIdx.x; i < p.nodes; i += kThreads) {
    const float exponent = z[i] - peak;
    z[i] = exponent < kLowestExponent ? 0.0f : expf(exponent);
    sum += static_cast<double>(z[i]) * keys_of(i);
  }
  sum = joined(sum, [](double a, double b) { return a + b; });
  const float factor = numbers != 0 && sum > 0.0 ? static_cast<float>(keys / sum) : 0.0f;
  for (std::int64_t i = threadIdx.x; i < p.nodes; i += kThreads) z[i] *= factor;
}

__global__ void average_kernel(const float* weights, std::int64_t rows, std::int64_t nodes, std::int64_t each,
                               bool squares, float* scores) {
  const std::int64_t node = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, unit = blockIdx.y,
                     begin = unit * each, end = min(rows, begin + each);
  if (node >= nodes) return;
  float sum = 0.0f;
  for (std::int64_t row = begin; row < end; ++row) {
    const float weight = weights[row * nodes + node];
    sum += squares ? weight * weight : weight;
  }
  scores[unit * nodes + node] = sum / static_cast<float>(end - begin);
}

__global__ void bin_kernel(const float* scores, const std::int32_t* first, std::int64_t units,
                           std::int64_t nodes, const ScoreBinning rule, unsigned long long* bins) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= units * nodes) return;
  const double score = rule.squares ? sqrt(static_cast<double>(scores[i])) : scores[i];
  const double at = score > 0.0 ? (log(score) - rule.lowest) * rule.per_unit : 0.0;
  const int bin = static_cast<int>(fmin(fmax(at, 0.0), static_cast<double>(rule.bins - 1)));
  const std::int64_t node = i % nodes;
  atomicAdd(bins + bin, static_cast<unsigned long long>(first[node + 1] - first[node]));
}

/// A block a unit, kThreads nodes at a time.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const float* scores, const std::int32_t* first, std::int64_t nodes, double bar, bool all,
                 std::int32_t* places, std::int32_t* counts) {
  __shared__ int of_warp[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row = blockIdx.x * nodes;
  int before = 0;
  for (std::int64_t from = 0; from < nodes; from += kThreads) {
    const std::int64_t node = from + threadIdx.x;
    const bool kept = node < nodes && (all || static_cast<double>(scores[row + node]) > bar);
    const int own = kept ? first[node + 1] - first[node] : 0, up_to = sum_up_to(own, lane);
    if (lane == 31) of_warp[warp] = up_to;
    __syncthreads();
    int place = before + up_to - own;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) place += of_warp[i];
      before += of_warp[i];
    }
    if (node < nodes) places[row + node] = kept ? place : -1;
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = before;
}

/// A warp a node.
__global__ void list_kernel(const KeptLists p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t node = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, token = blockIdx.y,
                     unit = (p.token + token) / p.together, list = token * p.heads;
  if (node == 0 && lane == 0) p.to_counts[list] = p.counts[unit];
  if (node >= p.nodes) return;
  const std::int32_t place = p.places[unit * p.nodes + node], begin = p.first[node];
  if (place < 0) return;
  std::int32_t* const to = p.to + list * p.capacity + place;
  for (int i = lane; i < p.first[node + 1] - begin; i += 32) to[i] = p.rows[begin + i];
}

}  // namespace

void widen_rows(const void* from, DType type, const float* scales, std::int64_t rows, std::int64_t width,
                float* to, StreamHandle stream) {
  if (rows == 0) return;
  Launch(blocks_for(rows * width), kThreads, 0, stream)(widen_kernel, from, type, scales, rows * width, width,
                                                        to);
}

void plane_squares(const float* q, std::int64_t rows, std::int64_t d, float* squares, StreamHandle stream) {
  const std::int64_t planes = (d + 1) / 2;
  if (rows == 0) return;
  Launch(blocks_for(rows * planes), kThreads, 0, stream)(squares_kernel, q, rows * planes, d, planes,
                                                         squares);
}

void weigh_nodes(const NodeWeights& task, StreamHandle stream) {
  if (task.rows == 0) return;
  Launch(static_cast<unsigned>(task.rows), kThreads, 0, stream)(weigh_kernel, task);
}

void average_weights(const float* weights, std::int64_t rows, std::int64_t nodes, std::int64_t each,
                     bool squares, float* scores, StreamHandle stream) {
  if (rows == 0 || nodes == 0) return;
  const dim3 grid(blocks_for(nodes), static_cast<unsigned>((rows + each - 1) / each));
  Launch(grid, kThreads, 0, stream)(average_kernel, weights, rows, nodes, each, squares, scores);
}

void bin_scores(const float* scores, const std::int32_t* first, std::int64_t units, std::int64_t nodes,
                const ScoreBinning& rule, unsigned long long* bins, StreamHandle stream) {
  if (units * nodes == 0) return;
  Launch(blocks_for(units * nodes), kThreads, 0, stream)(bin_kernel, scores, first, units, nodes, rule, bins);
}

void place_kept(const float* scores, const std::int32_t* first, std::int64_t units, std::int64_t nodes,
                const double* bar, std::int32_t* places, std::int32_t* counts, StreamHandle stream) {
  if (units == 0) return;
  Launch(static_cast<unsigned>(units), kThreads, 0, stream)(
      place_kernel, scores, first, nodes, bar != nullptr ? *bar : 0.0, bar == nullptr, places, counts);
}

void list_kept(const KeptLists& task, StreamHandle stream) {
  if (task.tokens == 0) return;
  const dim3 grid(static_cast<unsigned>((task.nodes + kWarps - 1) / kWarps),
                  static_cast<unsigned>(task.tokens));
  Launch(grid, kThreads, 0, stream)(list_kernel, task);
}

}  // namespace lode::cuda
