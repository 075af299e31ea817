// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/matmul_bf16.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

// What a core has at hand: of kSlabColumns columns, 32 rows of weights stay in its first-level cache, a share's weights,
// its sums and kInputRows rows of x in its second. Up to kWholeColumns columns are not cut: a short rest costs more.
constexpr std::int64_t kSlabColumns = 512, kWholeColumns = 768;
constexpr std::int64_t kMostWeightRows = 128, kInputRows = 512;
constexpr std::int64_t kSharesPerThread = 8;

std::int64_t rounded_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

template <class T>
void grow(HugeVector<T>& to, std::int64_t size) {
  if (std::ssize(to) < size) to.resize(static_cast<std::size_t>(size));
}

/// Rows of the input that lie in the packed one, from a strip of tiles on, in whole blocks.
struct PackedRows {
  std::int64_t first, rows, strip = 0;
  std::int64_t strips() const { return rounded_up(rows, kBf16BlockRows) / kBf16TileRows; }
};
std::pair<std::int64_t, std::int64_t> range_of(const PackedRows& r) {
  return {r.first, r.rows};
}

/// Each range of rows that products want, once.
std::vector<PackedRows> packed_rows(std::span<const Bf16Product> products) {
  std::vector<PackedRows> packed;
  for (const Bf16Product& p : products) packed.push_back({p.first, p.y.rows});
  std::ranges::sort(packed, {}, range_of);
  const auto same = std::ranges::unique(packed, {}, range_of);
  packed.erase(same.begin(), same.end());
  std::int64_t strip = 0;
  for (PackedRows& r : packed) r.strip = strip, strip += r.strips();
  return packed;
}

/// Some rows of one weight, and where its rows of the input lie.
struct Share {
  const Bf16Product* product;
  std::int64_t first_row, rows, strip;
};

std::vector<Share> shares_of(std::span<const Bf16Product> products, std::span<const PackedRows> packed,
                             int threads) {
  std::int64_t all = 0;
  for (const Bf16Product& p : products) all += p.y.cols;
  const std::int64_t most = std::clamp<std::int64_t>(
      rounded_up(all / (threads * kSharesPerThread), kBf16BlockRows), kBf16BlockRows, kMostWeightRows);
  std::vector<Share> shares;
  for (const Bf16Product& p : products) {
    const auto rows = std::ranges::lower_bound(packed, std::pair(p.first, p.y.rows), {}, range_of);
    for (std::int64_t row = 0; row < p.y.cols; row += most)
      shares.push_back({&p, row, std::min(most, p.y.cols - row), rows->strip});
  }
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

/// A share's products with rows of x, whose tiles `input` are, to rows [row, row + rows) of y.
void multiply_share(const Share& s, std::int64_t width, const std::uint16_t* input, std::int64_t row,
                    std::int64_t rows, Bf16Scratch::Worker& worker) {
  const std::int64_t tiled_width = rounded_up(width, kBf16TileColumns), strip = tiled_width * kBf16TileRows,
                     slab = tiled_width <= kWholeColumns ? tiled_width : kSlabColumns;
  const std::int64_t w_blocks = rounded_up(s.rows, kBf16BlockRows) / kBf16BlockRows,
                     x_blocks = rounded_up(rows, kBf16BlockRows) / kBf16BlockRows;
  grow(worker.weights, 2 * w_blocks * slab * kBf16TileRows);
  grow(worker.sums, w_blocks * x_blocks * kBf16BlockRows * kBf16BlockRows);
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

/// Packs the rows of the input that fall in a strip of tiles, the first of which is `row`.
void pack_strip(Matrix<const float> x, std::int64_t row, int rows, std::span<const std::int64_t> order,
                std::uint16_t* to) {
  std::array<const float*, kBf16TileRows> from{};
  for (int r = 0; r < rows; ++r) {
    const std::int64_t place = order.empty() ? row + r : order[static_cast<std::size_t>(row + r)];
    from[static_cast<std::size_t>(r)] = x.data + place * x.stride;
  }
  bf16_product_kernels()->pack_input(from.data(), rows, x.cols, to);
}

void pack_rows(Matrix<const float> x, std::span<const PackedRows> packed, std::span<const std::int64_t> order,
               HugeVector<std::uint16_t>& to, ThreadPool& pool) {
  const std::int64_t strip = rounded_up(x.cols, kBf16TileColumns) * kBf16TileRows;
  const std::int64_t all = packed.back().strip + packed.back().strips();
  grow(to, all * strip);
  pool.for_each(all, [&](std::int64_t i, int) {
    const PackedRows& of = *std::prev(std::ranges::upper_bound(packed, i, {}, &PackedRows::strip));
    const std::int64_t row = (i - of.strip) * kBf16TileRows;
    const auto rows = static_cast<int>(std::clamp<std::int64_t>(of.rows - row, 0, kBf16TileRows));
    pack_strip(x, of.first + row, rows, order, to.data() + i * strip);
  });
}

}  // namespace

void matmul_bf16(Matrix<const float> x, std::span<const Bf16Product> products, Bf16Scratch& scratch,
                 ThreadPool& pool, std::span<const std::int64_t> order) {
  const std::int64_t rows = order.empty() ? x.rows : std::ssize(order);
  for (const Bf16Product& p : products)
    LODE_ASSERT(p.first >= 0 && p.first + p.y.rows <= rows &&
                (p.tiles == nullptr || (p.tiles->cols == x.cols && p.tiles->rows == p.y.cols)));
  LODE_ASSERT(x.cols > 0);
  if (products.empty()) return;
  const std::vector<PackedRows> packed = packed_rows(products);
  pack_rows(x, packed, order, scratch.input, pool);
  scratch.workers.resize(static_cast<std::size_t>(pool.size()));
  const std::vector<Share> shares = shares_of(products, packed, pool.size());
  const std::int64_t strip = rounded_up(x.cols, kBf16TileColumns) * kBf16TileRows;
  pool.for_each(std::ssize(shares), [&](std::int64_t i, int worker) {
    const Share& s = shares[static_cast<std::size_t>(i)];
    const std::int64_t all = s.product->y.rows;
    for (std::int64_t row = 0; row < all; row += kInputRows)
      multiply_share(s, x.cols, scratch.input.data() + (s.strip + row / kBf16TileRows) * strip, row,
                     std::min(kInputRows, all - row), scratch.workers[static_cast<std::size_t>(worker)]);
  });
}

}  // namespace lode
