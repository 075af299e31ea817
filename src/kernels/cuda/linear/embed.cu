// SPDX-License-Identifier: Apache-2.0
// The two ends of a forward pass: rows of the embedding, and the most likely token.
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

namespace {

constexpr int kEmbedThreads = 256, kArgmaxThreads = 1024;

/// An id outside of the table gives NaN, which every later step passes on to the logits.
__global__ void embed_kernel(const std::int32_t* tokens, const Vector table, std::int64_t rows,
                             std::int64_t cols, float* x) {
  const std::int64_t n = blockIdx.x, id = tokens[n];
  const bool known = id >= 0 && id < rows;
  for (std::int64_t i = threadIdx.x; i < cols; i += kEmbedThreads)
    x[n * cols + i] = known ? table[id * cols + i] : __int_as_float(0x7fffffff);
}

/// A candidate that orders as its integer does: a larger logit first, then a lower index. NaN is above all.
__device__ __forceinline__ unsigned long long candidate(float x, std::int64_t index) {
  if (x == 0.0f) x = 0.0f;  // -0 ties with 0
  unsigned bits = __float_as_uint(x);
  bits = isnan(x) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(bits) << 32 | (0xffffffffu - static_cast<unsigned>(index));
}

__global__ __launch_bounds__(kArgmaxThreads) void argmax_kernel(const float* logits, std::int64_t vocab,
                                                                std::int32_t* token) {
  __shared__ unsigned long long shared[kArgmaxThreads / 32];
  const float* row = logits + std::int64_t{blockIdx.x} * vocab;
  unsigned long long best = 0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < vocab; i += kArgmaxThreads) best = max(best, candidate(row[i], i));
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const unsigned long long other : shared) best = max(best, other);
  const bool nan = best >> 32 == 0xffffffffu;
  token[blockIdx.x] =
      nan || vocab == 0 ? -1 : static_cast<std::int32_t>(0xffffffffu - static_cast<unsigned>(best));
}

}  // namespace

void embed(const std::int32_t* tokens, std::int64_t n, const DeviceWeight& embedding, float* x,
           StreamHandle stream, float multiplier) {
  if (n == 0) return;
  if (embedding.tiled()) {
    embed_tiles(tokens, n, embedding.tiles(), x, stream);
  } else {
    Launch(static_cast<unsigned>(n), kEmbedThreads, 0, stream)(
        embed_kernel, tokens, {embedding.data, embedding.type}, embedding.rows, embedding.cols, x);
  }
  scale_and_cap(x, n * embedding.cols, multiplier, 0.0f, stream);
}

void argmax(const float* logits, std::int64_t n, std::int64_t vocab, std::int32_t* token,
            StreamHandle stream) {
  if (n == 0) return;
  Launch(static_cast<unsigned>(n), kArgmaxThreads, 0, stream)(argmax_kernel, logits, vocab, token);
}

}  // namespace lode::cuda
