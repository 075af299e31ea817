// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/matmul_tiled.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kShareBytes = std::int64_t{1} << 15;  // of weights: below, handing out costs more
constexpr std::int64_t kInputBytes = std::int64_t{1} << 19;  // of x: stays in the second-level cache
constexpr std::int64_t kSharesPerThread = 32;

/// Some rows of x times some tiles of one weight.
struct Share {
  const TiledProduct* product;
  std::int64_t first_row, rows;  // of the weight
  std::int64_t first, count;     // of x
};

std::vector<Share> shares_of(const RoundedRows& x, std::span<const TiledProduct> products, int threads) {
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

/// Calls body(row) for rows of so many columns, in parallel where that pays.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t cols, ThreadPool& pool, const Body& body) {
  constexpr std::int64_t kAlone = 1 << 12;  // numbers: some microseconds' work
  if (rows * cols <= kAlone)
    for (std::int64_t m = 0; m < rows; ++m) body(m);
  else
    pool.for_each(rows, [&](std::int64_t m, int) { body(m); });
}

void quantise_rows(Matrix<const float> x, RoundedRows& to, ThreadPool& pool) {
  const TiledProductKernels& table = tiled_product_kernels();
  to.resize(x.rows, x.cols);
  for_rows(x.rows, x.cols, pool, [&](std::int64_t m) { table.quantise(x.data + m * x.stride, m, to); });
}

/// The first place of a row of x in the order takes its codes, the others copy them.
void quantise_in_order(Matrix<const float> x, std::span<const std::int64_t> order, RoundedRows& to,
                       ThreadPool& pool) {
  const TiledProductKernels& table = tiled_product_kernels();
  to.resize(std::ssize(order), x.cols);
  std::vector<std::int64_t> place(static_cast<std::size_t>(x.rows), -1), firsts, copies;
  for (std::int64_t m = 0; m < std::ssize(order); ++m) {
    std::int64_t& first = place[static_cast<std::size_t>(order[static_cast<std::size_t>(m)])];
    (first < 0 ? firsts : copies).push_back(m);
    if (first < 0) first = m;
  }
  const auto row_of = [&](std::int64_t m) { return order[static_cast<std::size_t>(m)]; };
  for_rows(std::ssize(firsts), x.cols, pool, [&](std::int64_t i) {
    const std::int64_t m = firsts[static_cast<std::size_t>(i)];
    table.quantise(x.data + row_of(m) * x.stride, m, to);
  });
  for_rows(std::ssize(copies), x.cols / 8, pool, [&](std::int64_t i) {  // a copy is far quicker
    const std::int64_t m = copies[static_cast<std::size_t>(i)];
    to.copy_row(place[static_cast<std::size_t>(row_of(m))], m);
  });
}

}  // namespace

void matmul_tiled(Matrix<const float> x, std::span<const TiledProduct> products, RoundedRows& scratch,
                  ThreadPool& pool, std::span<const std::int64_t> order) {
  const std::int64_t rows = order.empty() ? x.rows : std::ssize(order);
  for (const TiledProduct& p : products)
    LODE_ASSERT(p.w->cols == x.cols && p.first >= 0 && p.first + p.y.rows <= rows && p.y.cols == p.w->rows);
  if (x.rows == 0) return;
  if (order.empty())
    quantise_rows(x, scratch, pool);
  else
    quantise_in_order(x, order, scratch, pool);
  const std::vector<Share> shares = shares_of(scratch, products, pool.size());
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
