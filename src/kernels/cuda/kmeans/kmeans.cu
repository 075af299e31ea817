// SPDX-License-Identifier: Apache-2.0
// Everything of k-means but its products (products.cu). Work map: a warp a row or a centroid, its lanes the
// columns.
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/kmeans/kmeans.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMostColumns = kMostWidth / 32;  // of a lane
constexpr int kDraws = 32;  // as many as ann/kmeans.cc has for an empty cluster

__device__ __forceinline__ float max_of_warp(float x) {
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
__device__ __forceinline__ double sum_of_warp(double x) {
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

/// A row of a warp: column lane + 32 j in x[j], 0 behind the last one.
struct Row {
  float x[kMostColumns];

  __device__ __forceinline__ void load(const float* from, int width, int lane) {
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) x[j] = lane + 32 * j < width ? from[lane + 32 * j] : 0.0f;
  }
  __device__ __forceinline__ void store(float* to, int width, int lane) const {
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j)
      if (lane + 32 * j < width) to[lane + 32 * j] = x[j];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) x[j] = 0.0f;
  }
  __device__ __forceinline__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) all = all && isfinite(x[j]);
    return __all_sync(~0u, all);
  }
  __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) most = fmaxf(most, fabsf(x[j]));
    return max_of_warp(most);
  }
  __device__ __forceinline__ double square() const {
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) sum += static_cast<double>(x[j]) * x[j];
    return sum_of_warp(sum);
  }
  __device__ __forceinline__ void to_direction() {
    const double square = this->square(), factor = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) x[j] = static_cast<float>(x[j] * factor);
  }
  /// Over the power of two that brings the largest number into [1/2, 1): halves have the most room below.
  __device__ __forceinline__ void put_halves(__half* to, float* factor, int half_width, int lane) const {
    const float most = largest();
    const int power = most > 0.0f ? max(-126, min(126, ilogbf(most) + 1)) : 0;
    if (lane == 0) *factor = ldexpf(1.0f, power);
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j)
      if (lane + 32 * j < half_width) to[lane + 32 * j] = __float2half_rn(ldexpf(x[j], -power));
  }
};

__global__ void halve_kernel(float* rows, HalfRows to, std::int64_t all, int half_width) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t at = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (at >= all) return;
  Row row;
  row.load(rows + at * to.width, to.width, lane);
  if (!row.finite()) {
    row.clear();
    row.store(rows + at * to.width, to.width, lane);
  }
  row.put_halves(static_cast<__half*>(to.halves) + at * half_width, to.factors + at, half_width, lane);
}

__global__ void directions_kernel(const float* rows, std::int64_t n, int width, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t at = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (at >= n) return;
  Row row;
  row.load(rows + at * width, width, lane);
  row.to_direction();
  row.store(to + at * width, width, lane);
}

__global__ void subtract_kernel(float* rows, std::int64_t of_head, int width, const float* minus) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= of_head) return;
  constexpr float kMost = 1e38f;  // a difference of two floats may be none
  float& x = rows[blockIdx.y * of_head + i];
  x = fminf(fmaxf(x - minus[blockIdx.y * width + i % width], -kMost), kMost);
}

/// Bits of floats that are not below 0 are ordered as they are.
__global__ void largest_kernel(const float* rows, std::int64_t of_head, float* largest) {
  float most = 0.0f;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < of_head;
       i += std::int64_t{gridDim.x} * kThreads)
    most = fmaxf(most, fabsf(rows[blockIdx.y * of_head + i]));
  most = max_of_warp(most);
  if (threadIdx.x % 32 == 0)
    atomicMax(reinterpret_cast<unsigned*>(largest) + blockIdx.y, __float_as_uint(most));
}

/// Whole numbers of so many bits, such that n of them have a sum of 62.
__device__ __forceinline__ int bits_for(std::int64_t n) {
  const int of_count = 64 - __clzll(n);
  return min(40, 62 - of_count);
}
/// 2^shift of a head: the largest number times it has bits_for(n).
__device__ __forceinline__ int shift_of(const LabelSums& sums, std::int64_t head, bool squares) {
  const float most = sums.largest[head];
  if (!(most > 0.0f)) return 0;
  const int power = ilogbf(most) + 1;
  return bits_for(sums.count) - (squares ? 2 * (power + 1) : power);  // a difference may be twice as large
}
__device__ __forceinline__ double power_of_two(int shift) {
  return ldexp(1.0, shift);
}

template <bool kSquares>
__global__ void sum_kernel(const float* rows, const std::int32_t* labels, const float* means, LabelSums to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t head = blockIdx.y, i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (i >= to.count) return;
  const std::int32_t label = labels != nullptr ? labels[head * to.count + i] : 0;
  const std::int64_t own = head * to.labels + label;
  const double unit = power_of_two(shift_of(to, head, kSquares));
  Row row;
  row.load(rows + (head * to.count + i) * to.width, to.width, lane);
  auto* const sums = reinterpret_cast<unsigned long long*>(to.sums) + own * to.width;
#pragma unroll
  for (int j = 0; j < kMostColumns; ++j) {
    const int column = lane + 32 * j;
    if (column >= to.width) break;
    double x = row.x[j];
    if constexpr (kSquares) {
      x -= means[own * to.width + column];
      x *= x;
    }
    atomicAdd(sums + column, static_cast<unsigned long long>(__double2ll_rn(x * unit)));
  }
  if (lane == 0) atomicAdd(to.counts + own, 1);
}

template <bool kSquares>
__global__ void means_kernel(LabelSums from, const float* plus, float* means) {
  const std::int64_t of_head = from.labels * from.width,
                     i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, head = blockIdx.y;
  if (i >= of_head) return;
  const std::int32_t count = from.counts[head * from.labels + i / from.width];
  double mean = 0.0;
  if (count > 0)
    mean = static_cast<double>(from.sums[head * of_head + i]) *
           power_of_two(-shift_of(from, head, kSquares)) / count;
  if (plus != nullptr && count > 0) mean += plus[head * from.width + i % from.width];
  means[head * of_head + i] = static_cast<float>(mean);
}

/// Makes a row a centroid: its direction, or itself with half its square as a bias.
__device__ __forceinline__ void put_centroid(Row row, const Clusters& to, std::int64_t at, int half_width,
                                             int lane) {
  const int width = to.centroids.width;
  float bias = 0.0f;
  if (to.by_distance)
    bias = fmaxf(-3e38f, static_cast<float>(-0.5 * row.square()));
  else
    row.to_direction();
  row.store(to.rows + at * width, width, lane);
  row.put_halves(static_cast<__half*>(to.centroids.halves) + at * half_width, to.centroids.factors + at,
                 half_width, lane);
  if (lane == 0) to.biases[at] = bias;
}

__global__ void start_kernel(const float* points, std::int64_t n, const std::int32_t* start, Clusters to,
                             int half_width) {
  const int lane = static_cast<int>(threadIdx.x) % 32, width = to.centroids.width;
  const std::int64_t head = blockIdx.y, c = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (c >= to.centroids.count) return;
  const std::int64_t at = head * to.centroids.count + c;
  Row row;
  row.load(points + (head * n + start[at]) * width, width, lane);
  put_centroid(row, to, at, half_width, lane);
}

/// Rng of base/rng.h.
__device__ __forceinline__ std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// A point of a cluster that has several; -1: none was drawn.
__device__ __forceinline__ std::int64_t draw_point(const std::int32_t* labels, const LabelSums& sums,
                                                   std::int64_t head, std::uint64_t state) {
  for (int draw = 0; draw < kDraws; ++draw) {
    const auto point =
        static_cast<std::int64_t>(__umul64hi(next_random(state), static_cast<std::uint64_t>(sums.count)));
    if (sums.counts[head * sums.labels + labels[head * sums.count + point]] > 1) return point;
  }
  return -1;
}

__global__ void move_kernel(const float* points, const std::int32_t* labels, LabelSums sums,
                            const std::uint64_t* seeds, Clusters to, int half_width) {
  const int lane = static_cast<int>(threadIdx.x) % 32, width = sums.width;
  const std::int64_t head = blockIdx.y, c = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (c >= sums.labels) return;
  const std::int64_t at = head * sums.labels + c;
  const std::int32_t count = sums.counts[at];
  Row row;
  if (count > 0) {
    const double unit = power_of_two(-shift_of(sums, head, false)) / count;
#pragma unroll
    for (int j = 0; j < kMostColumns; ++j) {
      const int column = lane + 32 * j;
      row.x[j] = column < width
                     ? static_cast<float>(static_cast<double>(sums.sums[at * width + column]) * unit)
                     : 0.0f;
    }
  } else {
    const std::int64_t point =
        draw_point(labels, sums, head, seeds[head] + static_cast<std::uint64_t>(c) * 0x632be59bd9b4e019ull);
    if (point < 0) return;
    row.load(points + (head * sums.count + point) * width, width, lane);
  }
  put_centroid(row, to, at, half_width, lane);
}

unsigned blocks_of(std::int64_t items, int of_block) {
  return static_cast<unsigned>((items + of_block - 1) / of_block);
}
dim3 grid_of(std::int64_t items, int of_block, int heads) {
  return {blocks_of(items, of_block), static_cast<unsigned>(heads)};
}

template <bool kSquares>
void add_up(const float* rows, const std::int32_t* labels, const float* means, const LabelSums& to,
            StreamHandle stream) {
  const std::int64_t of_head = to.count * to.width;
  fill(to.sums, 0, to.heads * to.labels * to.width * std::int64_t{sizeof(std::int64_t)}, stream);
  fill(to.counts, 0, to.heads * to.labels * std::int64_t{sizeof(std::int32_t)}, stream);
  fill(to.largest, 0, to.heads * std::int64_t{sizeof(float)}, stream);
  if (of_head == 0) return;
  const std::int64_t some = std::min<std::int64_t>(of_head, std::int64_t{512} * kThreads);
  Launch(grid_of(some, kThreads, to.heads), kThreads, 0, stream)(largest_kernel, rows, of_head, to.largest);
  Launch(grid_of(to.count, kWarps, to.heads), kThreads, 0, stream)(sum_kernel<kSquares>, rows, labels, means,
                                                                   to);
}

}  // namespace

void halve(float* rows, const HalfRows& to, StreamHandle stream) {
  const std::int64_t all = to.heads * to.count;
  if (all == 0) return;
  Launch(blocks_of(all, kWarps), kThreads, 0, stream)(halve_kernel, rows, to, all, half_width(to.width));
}

void directions(const float* rows, std::int64_t n, int width, float* to, StreamHandle stream) {
  if (n == 0) return;
  Launch(blocks_of(n, kWarps), kThreads, 0, stream)(directions_kernel, rows, n, width, to);
}

void subtract(float* rows, int heads, std::int64_t n, int width, const float* minus, StreamHandle stream) {
  if (n == 0) return;
  Launch(grid_of(n * width, kThreads, heads), kThreads, 0, stream)(subtract_kernel, rows, n * width, width,
                                                                   minus);
}

void sum_by_label(const float* rows, const std::int32_t* labels, const LabelSums& to, StreamHandle stream) {
  add_up<false>(rows, labels, nullptr, to, stream);
}

void sum_squares_by_label(const float* rows, const std::int32_t* labels, const float* means,
                          const LabelSums& to, StreamHandle stream) {
  add_up<true>(rows, labels, means, to, stream);
}

void means_by_label(const LabelSums& from, const float* plus, float* means, StreamHandle stream) {
  Launch(grid_of(from.labels * from.width, kThreads, from.heads), kThreads, 0, stream)(means_kernel<false>,
                                                                                       from, plus, means);
}

void squares_by_label(const LabelSums& from, float* means, StreamHandle stream) {
  Launch(grid_of(from.labels * from.width, kThreads, from.heads), kThreads, 0, stream)(means_kernel<true>,
                                                                                       from, nullptr, means);
}

void start_clusters(const float* points, std::int64_t n, const std::int32_t* start, const Clusters& to,
                    StreamHandle stream) {
  Launch(grid_of(to.centroids.count, kWarps, to.centroids.heads), kThreads, 0, stream)(
      start_kernel, points, n, start, to, half_width(to.centroids.width));
}

void move_clusters(const float* points, const std::int32_t* labels, const LabelSums& sums,
                   const std::uint64_t* seeds, const Clusters& to, StreamHandle stream) {
  Launch(grid_of(sums.labels, kWarps, sums.heads), kThreads, 0, stream)(move_kernel, points, labels, sums,
                                                                        seeds, to, half_width(sums.width));
}

}  // namespace lode::cuda
