// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/matmul_bf16.h"

#include <algorithm>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

// Numbers of weights, and rows of x beside them, that a core has at hand: 32 rows of a slab stay in its first-level
// cache; a share's slab, its sums and a block of rows of x in its second.
constexpr std::int64_t kSlabColumns = 512, kWholeColumns = 768;
constexpr std::int64_t kMostWeightRows = 128, kInputRows = 512;
constexpr std::int64_t kSharesPerThread = 8;

std::int64_t rounded_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

/// Some rows of one weight.
struct Share {
  const Bf16Product* product;
  std::int64_t first_row, rows;
};

std::vector<Share> shares_of(std::span<const Bf16Product> products, int threads) {
  std::int64_t all = 0;
  for (const Bf16Product& p : products) all += p.y.cols;
  const std::int64_t most = std::clamp<std::int64_t>(
      rounded_up(all / (threads * kSharesPerThread), kBf16BlockRows), kBf16BlockRows, kMostWeightRows);
  std::vector<Share> shares;
  for (const Bf16Product& p : products)
    for (std::int64_t row = 0; row < p.y.cols; row += most)
      shares.push_back({&p, row, std::min(most, p.y.cols - row)});
  return shares;
}

/// Columns [first, first + cols) of a share's weights as tiles, in whole blocks of rows.
void pack_weights(const Share& s, std::int64_t width, std::int64_t first, std::int64_t cols,
                  std::int64_t strip, std::uint16_t* to) {
  const Bf16ProductKernels& table = *bf16_product_kernels();
  for (std::int64_t row = 0; row < rounded_up(s.rows, kBf16BlockRows); row += kBf16TileRows, to += strip) {
    const auto rows = static_cast<int>(std::clamp<std::int64_t>(s.rows - row, 0, kBf16TileRows));
    const TiledWeight* const tiles = s.product->tiles;
    if (tiles == nullptr) {
      table.pack_weight(s.product->plain + (s.first_row + row) * width + first, width, rows, cols, to);
    } else if (rows > 0) {
      const std::int64_t tile = (s.first_row + row) / kTileRows16;
      table.unpack[static_cast<std::size_t>(tiles->type)](
          tiles->bytes.data() + tile * TileLayout{tile_format(tiles->type)}.tile_bytes(width), first, cols,
          to);
    } else {
      std::fill_n(to, strip, std::uint16_t{0});
    }
  }
}

/// Sums [blocks of weights, blocks of x, 32, 32] to rows of y from `row` on.
void give(const Share& s, const float* sums, std::int64_t row, std::int64_t rows) {
  const Matrix<float>& y = s.product->y;
  for (std::int64_t w = 0; w < s.rows; w += kBf16BlockRows)
    for (std::int64_t x = 0; x < rounded_up(rows, kBf16BlockRows); ++x, sums += kBf16BlockRows)
      if (x < rows)
        std::copy_n(sums, std::min<std::int64_t>(kBf16BlockRows, s.rows - w),
                    y.data + (row + x) * y.stride + s.first_row + w);
}

/// A share's products with `blocks` blocks of x, of which `input` are the tiles; rows [row, row + rows) of y.
void multiply_share(const Share& s, std::int64_t width, const std::uint16_t* input, std::int64_t row,
                    std::int64_t rows, Bf16Scratch::Worker& worker) {
  const std::int64_t tiled_width = rounded_up(width, kBf16TileColumns), strip = tiled_width * kBf16TileRows,
                     slab = tiled_width <= kWholeColumns ? tiled_width : kSlabColumns;
  const std::int64_t w_blocks = rounded_up(s.rows, kBf16BlockRows) / kBf16BlockRows,
                     x_blocks = rounded_up(rows, kBf16BlockRows) / kBf16BlockRows;
  worker.weights.resize(static_cast<std::size_t>(2 * w_blocks * slab * kBf16TileRows));
  worker.sums.resize(static_cast<std::size_t>(w_blocks * x_blocks * kBf16BlockRows * kBf16BlockRows));
  for (std::int64_t first = 0; first < width; first += slab) {
    const std::int64_t cols = std::min(slab, width - first),
                       steps = (cols + kBf16TileColumns - 1) / kBf16TileColumns;
    pack_weights(s, width, first, cols, slab * kBf16TileRows, worker.weights.data());
    bf16_product_kernels()->multiply({input + first * kBf16TileRows, x_blocks, strip, steps},
                                     {worker.weights.data(), w_blocks, slab * kBf16TileRows, steps},
                                     first > 0, worker.sums.data());
  }
  give(s, worker.sums.data(), row, rows);
}

}  // namespace

void matmul_bf16(Matrix<const float> x, std::span<const Bf16Product> products, Bf16Scratch& scratch,
                 ThreadPool& pool) {
  for (const Bf16Product& p : products)
    LODE_ASSERT(p.y.rows == x.rows &&
                (p.tiles == nullptr || (p.tiles->cols == x.cols && p.tiles->rows == p.y.cols)));
  if (x.rows == 0) return;
  const std::int64_t strip = rounded_up(x.cols, kBf16TileColumns) * kBf16TileRows,
                     strips = 2 * (rounded_up(x.rows, kBf16BlockRows) / kBf16BlockRows);
  if (std::ssize(scratch.input) < strips * strip)
    scratch.input.resize(static_cast<std::size_t>(strips * strip));
  scratch.workers.resize(static_cast<std::size_t>(pool.size()));
  pool.for_each(strips, [&](std::int64_t i, int) {
    const std::int64_t row = i * kBf16TileRows;
    const auto rows = static_cast<int>(std::clamp<std::int64_t>(x.rows - row, 0, kBf16TileRows));
    bf16_product_kernels()->pack_input(x.data + row * x.stride, x.stride, rows, x.cols,
                                       scratch.input.data() + i * strip);
  });
  const std::vector<Share> shares = shares_of(products, pool.size());
  pool.for_each(std::ssize(shares), [&](std::int64_t i, int worker) {
    for (std::int64_t row = 0; row < x.rows; row += kInputRows)
      multiply_share(shares[static_cast<std::size_t>(i)], x.cols,
                     scratch.input.data() + row / kBf16TileRows * strip, row,
                     std::min(kInputRows, x.rows - row), scratch.workers[static_cast<std::size_t>(worker)]);
  });
}

}  // namespace lode
