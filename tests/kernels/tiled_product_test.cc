// SPDX-License-Identifier: Apache-2.0
// Products of rounded activations with tiled weights: every table and type against sums in double over what the
// blocks stand for; rows do not depend on their company.
#include "kernels/tiled_product.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/blocks/matmul_blocks.h"
#include "kernels/blocks/matmul_tiled.h"
#include "kernels/dequantise.h"
#include "random_blocks.h"

namespace lode {
namespace {

class TiledProducts : public testing::TestWithParam<const TiledProductKernels*> {
 protected:
  RoundedRows quantised(const std::vector<float>& x, std::int64_t rows, std::int64_t cols) const {
    RoundedRows to;
    to.resize(rows, cols);
    for (std::int64_t m = 0; m < rows; ++m) GetParam()->quantise(x.data() + m * cols, m, to);
    return to;
  }
  std::vector<float> products(const RoundedRows& x, std::int64_t first, std::int64_t count,
                              const TiledWeight& w) const {
    std::vector<float> y(static_cast<std::size_t>(count * (w.rows + 3)), -7.0f);
    GetParam()->products[static_cast<std::size_t>(w.type)](x, first, count, w.bytes.data(), w.rows, y.data(),
                                                           w.rows + 3);
    return y;
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, TiledProducts, testing::ValuesIn(supported_tiled_product_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(TiledProducts, AreThoseOfTheBlocks) {
  ThreadPool pool(2);
  HugeArena arena;
  for (const WeightLayout& layout : weight_layouts()) {
    if (is_plain(layout.type)) continue;
    const std::int64_t rows = 37, cols = layout.block == 32 ? 96 : 512, count = 15;
    const std::vector<std::byte> blocks = random_blocks(layout.type, rows, cols);
    const TiledWeight tiles = tile_weight(layout.type, blocks.data(), rows, cols, arena, pool);
    std::vector<float> w(static_cast<std::size_t>(rows * cols));
    dequantise(layout.type, blocks.data(), rows * cols, w.data());
    const RoundedRows x = quantised(random_rows(count, cols), count, cols);
    const std::vector<float> y = products(x, 0, count, tiles);
    for (std::int64_t m = 0; m < count; ++m) {
      for (std::int64_t r = 0; r < rows; ++r) {
        double sum = 0, size = 0;
        for (std::int64_t c = 0; c < cols; ++c) {
          const std::int64_t at = m * cols + c;
          const double product =
              static_cast<double>(w[static_cast<std::size_t>(r * cols + c)]) *
              x.scales[static_cast<std::size_t>(at / 32)] *
              (256 * x.high[static_cast<std::size_t>(at)] + x.low[static_cast<std::size_t>(at)]);
          sum += product;
          size += std::abs(product);
        }
        // Minima and offsets cancel what the sums of codes bring: their own size counts too.
        ASSERT_NEAR(y[static_cast<std::size_t>(m * (rows + 3) + r)], sum, 3e-6 * size + 1e-20)
            << layout.name << " row " << r << " of x " << m;
      }
      for (std::int64_t r = rows; r < rows + 3; ++r)  // what lies between rows of y stays
        ASSERT_EQ(y[static_cast<std::size_t>(m * (rows + 3) + r)], -7.0f);
    }
  }
}

TEST_P(TiledProducts, RowsDoNotDependOnTheirCompany) {
  ThreadPool pool(1);
  HugeArena arena;
  for (const WeightLayout& layout : weight_layouts()) {
    if (is_plain(layout.type)) continue;
    const std::int64_t rows = 19, cols = 512, count = 16;
    const TiledWeight tiles =
        tile_weight(layout.type, random_blocks(layout.type, rows, cols).data(), rows, cols, arena, pool);
    const RoundedRows x = quantised(random_rows(count, cols), count, cols);
    const std::vector<float> all = products(x, 0, count, tiles);
    for (std::int64_t some = 1; some <= count; ++some) {
      for (std::int64_t first = 0; first + some <= count; first += some) {
        const std::vector<float> y = products(x, first, some, tiles);
        ASSERT_EQ(std::memcmp(y.data(), all.data() + first * (rows + 3), y.size() * sizeof(float)), 0)
            << layout.name << " rows from " << first << ", " << some;
      }
    }
  }
}

TEST_P(TiledProducts, QuantisesWhatHurts) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  std::vector<float> x(5 * 32, 0.0f);
  x[3] = 1e-38f;                            // block 0: too small to count
  x[32] = -5.0f, x[33] = 2.5f;              // block 1
  x[64 + 31] = nan, x[96 + 1] = -infinity;  // blocks 2, 3
  for (std::size_t i = 128; i < 160; ++i) x[i] = 3e38f;
  const RoundedRows q = quantised(x, 1, 160);
  EXPECT_EQ(q.scales[0], 0.0f);
  const auto code = [&](std::size_t i) { return 256 * q.high[i] + q.low[i]; };
  EXPECT_EQ(code(32), -kMostInt16);
  EXPECT_EQ(code(33), 16320);  // 16319.5, ties to even
  EXPECT_EQ(q.minus32[1], kMostInt16 - 16320);
  EXPECT_EQ(q.minus16[2], kMostInt16 - 16320);
  EXPECT_EQ(q.minus16[3], 0);
  EXPECT_TRUE(std::isnan(q.scales[2]));
  EXPECT_TRUE(std::isnan(q.scales[3]));
  EXPECT_EQ(code(159), kMostInt16);
  EXPECT_NEAR(q.scales[4] * static_cast<float>(kMostInt16), 3e38f, 1e32f);
}

/// The driver over many rows, and float32 activations beside rounded ones.
TEST(MatmulTiled, ComesCloseToFloat32) {
  ThreadPool pool(2);
  HugeArena arena;
  for (const WeightType type : {WeightType::q4_1, WeightType::q6_k, WeightType::q8_0}) {
    const std::int64_t rows = 70, cols = 768, count = 75;
    const std::vector<std::byte> blocks = random_blocks(type, rows, cols);
    const TiledWeight tiles = tile_weight(type, blocks.data(), rows, cols, arena, pool);
    std::vector<float> x = random_rows(count, cols);
    for (float& v : x) v = std::tanh(v);
    std::vector<float> exact(static_cast<std::size_t>(count * rows)), again = exact, found = exact;
    const Matrix<const float> in(x.data(), count, cols);
    matmul_blocks(in, blocks.data(), type, {exact.data(), count, rows}, pool);
    RoundedRows scratch;
    const TiledProduct both[] = {{&tiles, {found.data(), count, rows}},
                                 {&tiles, {again.data(), count, rows}}};
    matmul_tiled(in, both, scratch, pool);
    EXPECT_EQ(found, again);
    double error = 0, size = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      error += std::pow(double{exact[i]} - double{found[i]}, 2);
      size += std::pow(double{exact[i]}, 2);
    }
    EXPECT_LT(std::sqrt(error / size), 1e-4) << name_of(type);
  }
}

/// Rows of x that products take in an order of their own, some twice, have the bits that they have in place.
TEST(MatmulTiled, TakesRowsInAnOrder) {
  ThreadPool pool(2);
  HugeArena arena;
  const std::int64_t rows = 40, cols = 2048;
  const TiledWeight tiles = tile_weight(WeightType::q4_k, random_blocks(WeightType::q4_k, rows, cols).data(),
                                        rows, cols, arena, pool);
  const std::vector<float> x = random_rows(5, cols);
  const Matrix<const float> in(x.data(), 5, cols);
  RoundedRows scratch;
  const auto multiply = [&](std::int64_t count, std::span<const std::int64_t> order) {
    std::vector<float> y(static_cast<std::size_t>(count * rows));
    const std::int64_t first = count / 2;  // two products: of the rows before it, and from it on
    const TiledProduct both[] = {{&tiles, {y.data(), first, rows}},
                                 {&tiles, {y.data() + first * rows, count - first, rows}, first}};
    matmul_tiled(in, both, scratch, pool, order);
    return y;
  };
  const std::vector<float> in_place = multiply(5, {});
  for (const std::vector<std::int64_t>& order :
       {std::vector<std::int64_t>{3}, {0, 0, 0, 0}, {4, 1, 4, 0, 0, 2, 1, 3, 4, 4, 2}}) {
    const std::vector<float> y = multiply(std::ssize(order), order);
    for (std::size_t i = 0; i < order.size(); ++i)
      EXPECT_TRUE(std::equal(in_place.begin() + order[i] * rows, in_place.begin() + (order[i] + 1) * rows,
                             y.begin() + static_cast<std::ptrdiff_t>(i) * rows))
          << i << " of " << order.size();
  }
}

// A text is read in the background while a question's step, which it gives way to, waits for the same tiles.
TEST(LazyTiles, AreMadeAtOnceThoughAnUrgentStepWaitsForThem) {
  constexpr std::int64_t kRows = 64, kCols = 64, kMatrices = 8;
  const std::vector<std::byte> blocks(static_cast<std::size_t>(bytes_of(WeightType::q8_0, kRows * kCols)));
  const auto arena = std::make_shared<HugeArena>();
  ThreadPool pool(2);
  const ThreadPool::Urgent urgent(pool);
  const auto begin = std::chrono::steady_clock::now();
  std::thread([&] {
    const ThreadPool::Background background(pool);
    for (int i = 0; i < kMatrices; ++i)
      LazyTiles(arena).get(WeightType::q8_0, blocks.data(), kRows, kCols, pool);
  }).join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

}  // namespace
}  // namespace lode
