// SPDX-License-Identifier: Apache-2.0
// Products of activations with stored weights.
//
// A few rows stream the weights once through gemv. More rows go to oneDNN, one call per block of weight rows
// and thread: each call runs on the thread that makes it, so that the program keeps
// one pool of threads and no OpenMP worker spins beside it. Weights stay where they are; a block that needs
// another type is widened into per-thread scratch that fits the second-level cache.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/matmul_narrow.h"
#include "kernels/sgemm.h"
#include "lodestone/error.h"

namespace lode {
namespace {

constexpr std::int64_t kGemvRows = 8;      // of x in one gemv call
constexpr std::int64_t kGemvBlock = 64;    // weight rows of one task; fewer where threads would have none
constexpr std::int64_t kGemvTogether = 8;  // weight rows that gemv reads side by side

void stream_weights(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
                    ThreadPool& pool) {
  const KernelTable& table = kernels();
  const std::int64_t k = x.cols;
  std::vector<float> packed;  // gemv wants rows of x side by side
  const float* rows = x.data;
  if (x.stride != k && x.rows > 1) {
    packed.resize(static_cast<std::size_t>(x.rows * k));
    for (std::int64_t m = 0; m < x.rows; ++m) std::copy_n(x.data + m * x.stride, k, packed.data() + m * k);
    rows = packed.data();
  }
  const std::int64_t share = (n / pool.size() + kGemvTogether - 1) / kGemvTogether * kGemvTogether;
  const std::int64_t rows_of_task = std::clamp(share, kGemvTogether, kGemvBlock);
  pool.for_each((n + rows_of_task - 1) / rows_of_task, [&](std::int64_t task, int) {
    const std::int64_t begin = task * rows_of_task, end = std::min(n, begin + rows_of_task);
    for (std::int64_t m = 0; m < x.rows; m += kGemvRows)
      table.gemv(rows + m * k, static_cast<int>(std::min(kGemvRows, x.rows - m)), w, w_type, k, begin, end,
                 y.data + m * y.stride, y.stride);
  });
}

void multiply_f32(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
                  ThreadPool& pool) {
  const KernelTable& table = kernels();
  const std::int64_t k = x.cols,
                     block_rows = std::clamp<std::int64_t>((std::int64_t{1} << 18) / k / 16 * 16, 16, 512);
  std::vector<std::vector<float>> scratch(static_cast<std::size_t>(pool.size()));
  pool.for_each((n + block_rows - 1) / block_rows, [&](std::int64_t block, int worker) {
    const std::int64_t begin = block * block_rows, count = std::min(n - begin, block_rows);
    const float* weights = static_cast<const float*>(w) + begin * k;
    if (w_type != DType::f32) {
      std::vector<float>& wide = scratch[static_cast<std::size_t>(worker)];
      wide.resize(static_cast<std::size_t>(block_rows * k));
      table.widen(static_cast<const std::byte*>(w) + begin * k * bytes_of(w_type), w_type, count * k,
                  wide.data());
      weights = wide.data();
    }
    sgemm(x.rows, count, k, {x.data, x.stride}, {weights, k, true}, 0.0f, y.data + begin, y.stride);
  });
}

}  // namespace

void matmul_narrow(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
                   ThreadPool& pool) {
  LODE_ASSERT(x.rows == y.rows && y.cols == n && w_type != DType::q8);
  if (x.rows > 0 && n > 0) stream_weights(x, w, w_type, n, y, pool);
}

void matmul(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
            ThreadPool& pool) {
  LODE_ASSERT(x.rows == y.rows && y.cols == n && w_type != DType::q8);
  if (x.rows == 0 || n == 0) return;
  if (x.rows <= kGemvRows) {
    stream_weights(x, w, w_type, n, y, pool);
  } else {
    multiply_f32(x, w, w_type, n, y, pool);
  }
}

}  // namespace lode
