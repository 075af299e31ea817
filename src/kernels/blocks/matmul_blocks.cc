// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/matmul_blocks.h"

#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "kernels/dequantise.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kScratch = std::int64_t{1} << 16;  // numbers: a part of the second-level cache
constexpr std::int64_t kMostRows = 64, kGemvRows = 8;

/// gemv wants rows side by side.
std::vector<float> packed_rows(Matrix<const float> x) {
  std::vector<float> packed(static_cast<std::size_t>(x.rows * x.cols));
  for (std::int64_t m = 0; m < x.rows; ++m)
    std::copy_n(x.data + m * x.stride, x.cols, packed.data() + m * x.cols);
  return packed;
}

}  // namespace

void matmul_blocks(Matrix<const float> x, const std::byte* w, WeightType type, Matrix<float> y,
                   ThreadPool& pool) {
  LODE_ASSERT(x.rows == y.rows && x.cols % layout_of(type).block == 0);
  if (x.rows == 0 || y.cols == 0) return;
  const std::int64_t k = x.cols, n = y.cols, row_bytes = bytes_of(type, k);
  std::vector<float> packed;
  if (x.stride != k && x.rows > 1) packed = packed_rows(x);
  const float* const rows = packed.empty() ? x.data : packed.data();
  const std::int64_t together = std::clamp<std::int64_t>(kScratch / k, 1, kMostRows);
  std::vector<std::vector<float>> scratch(static_cast<std::size_t>(pool.size()));
  pool.for_each((n + together - 1) / together, [&](std::int64_t block, int worker) {
    const std::int64_t begin = block * together, count = std::min(n - begin, together);
    std::vector<float>& wide = scratch[static_cast<std::size_t>(worker)];
    wide.resize(static_cast<std::size_t>(together * k));
    dequantise(type, w + begin * row_bytes, count * k, wide.data());
    for (std::int64_t m = 0; m < x.rows; m += kGemvRows)
      kernels().gemv(rows + m * k, static_cast<int>(std::min(kGemvRows, x.rows - m)), wide.data(), DType::f32,
                     k, 0, count, y.data + m * y.stride + begin, y.stride);
  });
}

}  // namespace lode
