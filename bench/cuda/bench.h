// SPDX-License-Identifier: Apache-2.0
// What the benches of the CUDA kernels share: random device data, medians of graph replays, the read floor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda::bench {

static __global__ void random_bf16(std::uint16_t* to, std::int64_t count, float scale, unsigned seed) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint64_t h = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ (h >> 29)) * 0x94d049bb133111ebull;
    float sum = -2.0f;  // four uniform numbers: near enough to normal
    for (int part = 0; part < 4; ++part) sum += static_cast<float>(h >> (16 * part) & 0xffff) / 65536.0f;
    to[i] = static_cast<std::uint16_t>(__float_as_uint(sum * 1.7320508f * scale) >> 16);
  }
}
static __global__ void widen_all(const std::uint16_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x)
    to[i] = __uint_as_float(static_cast<unsigned>(from[i]) << 16);
}

/// bf16 numbers, or float32 of the same values.
inline Buffer random_weights(std::int64_t count, float scale, unsigned seed) {
  Buffer buffer(count * 2, "random numbers");
  Launch(1024, 256, 0, nullptr)(random_bf16, buffer.as<std::uint16_t>(), count, scale, seed);
  return buffer;
}
inline Buffer random_floats(std::int64_t count, float scale, unsigned seed) {
  const Buffer half = random_weights(count, scale, seed);
  Buffer buffer(count * 4, "random numbers");
  Launch(1024, 256, 0, nullptr)(widen_all, half.as<std::uint16_t>(), count, buffer.as<float>());
  LODE_CUDA(cudaDeviceSynchronize());
  return buffer;
}

/// Median microseconds of a replay of what `body` enqueues.
inline double median_replay(const Stream& stream, int replays, const std::function<void()>& body) {
  body();  // what is prepared at a first call stays out of the graph
  stream.synchronize();
  Graph::begin(stream.get());
  body();
  const Graph graph = Graph::end(stream.get());
  graph.launch(stream.get());
  std::vector<double> times;
  Timer timer;
  for (int i = 0; i < replays; ++i) {
    timer.start(stream.get());
    graph.launch(stream.get());
    timer.stop(stream.get());
    times.push_back(timer.microseconds());
  }
  std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
  return times[static_cast<std::size_t>(replays / 2)];
}

/// Microseconds of one call in graphs that hold calls for 3 ms or more; call(i) enqueues the i-th.
inline double time_of(const Stream& stream, const std::function<void(int)>& call) {
  constexpr int kReplays = 9, kMostCalls = 4096;
  for (int calls = 8;; calls *= 2) {
    const double us = median_replay(stream, kReplays, [&] {
      for (int i = 0; i < calls; ++i) call(i);
    });
    if (us >= 3000 || calls >= kMostCalls) return us / calls;
  }
}

static __global__ void read_all(const uint4* from, std::int64_t count, unsigned* out) {
  unsigned sum = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < 8; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < count; i += step) sum ^= from[i].x;
  if (sum == 0x12345678u) *out = sum;  // never, but the compiler cannot know
}
inline void read_bytes(const void* from, std::int64_t bytes, unsigned* out, StreamHandle stream,
                       int blocks = 132 * 8, int threads = 256) {
  Launch(blocks, threads, 0, stream)(read_all, static_cast<const uint4*>(from), bytes / 16, out);
}

/// Microseconds of the best plain read of so many bytes, which rotates through `memory`.
inline double read_floor(const Stream& stream, const Buffer& memory, std::int64_t bytes) {
  const std::int64_t places = std::max<std::int64_t>(1, memory.bytes() / bytes);
  const Buffer out(4, "what a read gives");
  double best = 1e30;
  for (const int blocks : {132, 264, 528, 1056}) {
    best = std::min(best, time_of(stream, [&](int i) {
                      read_bytes(memory.as<char>() + i % places * bytes / 16 * 16, bytes, out.as<unsigned>(),
                                 stream.get(), blocks, 512);
                    }));
  }
  return best;
}

}  // namespace lode::cuda::bench
