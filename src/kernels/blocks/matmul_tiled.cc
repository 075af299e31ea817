// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/matmul_tiled.h"

#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kShareBytes = std::int64_t{1} << 15;  // of weights: below, handing out costs more
constexpr std::int64_t kInputBytes = std::int64_t{1} << 19;  // of x: stays in the second-level cache
constexpr std::int64_t kSharesPerThread = 8;

/// Some rows of x times some tiles of one weight.
struct Share {
  const TiledProduct* product;
  std::int64_t first_row, rows;  // of the weight
  std::int64_t first, count;     // of x
};

std::vector<Share> shares_of(Matrix<const float> x, std::span<const TiledProduct> products, int threads) {
  const std::int64_t together = std::clamp<std::int64_t>(kInputBytes / x.cols / 8 * 8, 8, x.rows + 7);
  std::int64_t bytes = 0;
  for (const TiledProduct& p : products) bytes += std::ssize(p.w->bytes);
  const std::int64_t wanted = std::max(kShareBytes, bytes / (threads * kSharesPerThread));
  std::vector<Share> shares;
  for (std::int64_t done = 0; done < x.rows; done += together) {
    for (const TiledProduct& p : products) {
      const std::int64_t first = p.first + done, end = p.first + p.y.rows;
      if (first >= end) continue;
      const std::int64_t tiles = (p.w->rows + kTileRows16 - 1) / kTileRows16;
      const std::int64_t tile_bytes = std::ssize(p.w->bytes) / std::max<std::int64_t>(tiles, 1);
      const std::int64_t rows = std::max<std::int64_t>(wanted / tile_bytes, 1) * kTileRows16;
      for (std::int64_t row = 0; row < p.w->rows; row += rows)
        shares.push_back({&p, row, std::min(rows, p.w->rows - row), first, std::min(together, end - first)});
    }
  }
  return shares;
}

void quantise_rows(Matrix<const float> x, RoundedRows& to, ThreadPool& pool) {
  constexpr std::int64_t kAlone = 1 << 14;  // numbers
  const TiledProductKernels& table = tiled_product_kernels();
  to.resize(x.rows, x.cols);
  if (x.rows * x.cols <= kAlone) {
    for (std::int64_t m = 0; m < x.rows; ++m) table.quantise(x.data + m * x.stride, m, to);
  } else {
    pool.for_each(x.rows, [&](std::int64_t m, int) { table.quantise(x.data + m * x.stride, m, to); });
  }
}

}  // namespace

void matmul_tiled(Matrix<const float> x, std::span<const TiledProduct> products, RoundedRows& scratch,
                  ThreadPool& pool) {
  for (const TiledProduct& p : products)
    LODE_ASSERT(p.w->cols == x.cols && p.first >= 0 && p.first + p.y.rows <= x.rows && p.y.cols == p.w->rows);
  if (x.rows == 0) return;
  quantise_rows(x, scratch, pool);
  const std::vector<Share> shares = shares_of(x, products, pool.size());
  pool.for_each(std::ssize(shares), [&](std::int64_t i, int) {
    const Share& s = shares[static_cast<std::size_t>(i)];
    const TiledWeight& w = *s.product->w;
    const std::int64_t tile_bytes = TileLayout{tile_format(w.type)}.tile_bytes(w.cols);
    const Matrix<float>& y = s.product->y;
    tiled_product_kernels().products[static_cast<std::size_t>(w.type)](
        scratch, s.first, s.count, w.bytes.data() + s.first_row / kTileRows16 * tile_bytes, s.rows,
        y.data + (s.first - s.product->first) * y.stride + s.first_row, y.stride);
  });
}

}  // namespace lode
