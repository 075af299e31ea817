// SPDX-License-Identifier: Apache-2.0
// Products on the matrix unit, of weights in tiles of every type and of plain bf16, against sums in double over both
// operands rounded to bf16. Where the machine has no matrix unit there is nothing to test.
#include "kernels/bf16_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/blocks/matmul_bf16.h"
#include "kernels/dequantise.h"
#include "kernels/kernels.h"
#include "random_blocks.h"

namespace lode {
namespace {

std::vector<std::uint16_t> narrowed(const std::vector<float>& x) {
  std::vector<std::uint16_t> to(x.size());
  kernels().narrow(x.data(), std::ssize(x), DType::bf16, to.data());
  return to;
}
std::vector<float> rounded(const std::vector<float>& x) {
  std::vector<float> to(x.size());
  kernels().widen(narrowed(x).data(), DType::bf16, std::ssize(x), to.data());
  return to;
}

/// What a product is compared with: rows of x and of w [., cols], rounded to bf16. `ties`: numbers of w may be one
/// rounding apart.
void expect_products(const std::vector<float>& y, std::int64_t stride, const std::vector<float>& x,
                     const std::vector<float>& w, std::int64_t count, std::int64_t rows, std::int64_t cols,
                     const std::string& what) {
  const std::vector<float> in = rounded(x), weight = rounded(w);
  for (std::int64_t m = 0; m < count; ++m) {
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 0, size = 0, most = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        const double product = double{in[static_cast<std::size_t>(m * cols + c)]} *
                               double{weight[static_cast<std::size_t>(r * cols + c)]};
        sum += product, size += std::abs(product), most = std::max(most, std::abs(product));
      }
      // A weight near the middle of two bf16 numbers may be rounded the other way.
      ASSERT_NEAR(y[static_cast<std::size_t>(m * stride + r)], sum, 3e-6 * size + most / 128)
          << what << " row " << r << " of x " << m;
    }
  }
}

class Bf16Products : public testing::Test {
 protected:
  void SetUp() override {
    if (bf16_product_kernels() == nullptr) GTEST_SKIP() << "no matrix unit";
  }
};

TEST_F(Bf16Products, AreThoseOfTheBlocks) {
  ThreadPool pool(2);
  HugeArena arena;
  Bf16Scratch scratch;
  for (const WeightLayout& layout : weight_layouts()) {
    if (is_plain(layout.type)) continue;
    const std::int64_t rows = 77, cols = layout.block == 32 ? 96 : 1280, count = 43, stride = rows + 3;
    const std::vector<std::byte> blocks = random_blocks(layout.type, rows, cols);
    const TiledWeight tiles = tile_weight(layout.type, blocks.data(), rows, cols, arena, pool);
    std::vector<float> w(static_cast<std::size_t>(rows * cols)),
        y(static_cast<std::size_t>(count * stride), -7.0f);
    dequantise(layout.type, blocks.data(), rows * cols, w.data());
    const std::vector<float> x = random_rows(count, cols);
    const Bf16Product product{&tiles, nullptr, {y.data(), count, rows, stride}};
    matmul_bf16({x.data(), count, cols}, {&product, 1}, scratch, pool);
    expect_products(y, stride, x, w, count, rows, cols, std::string(layout.name));
    for (std::int64_t m = 0; m < count; ++m)
      for (std::int64_t r = rows; r < stride; ++r)  // what lies between rows of y stays
        ASSERT_EQ(y[static_cast<std::size_t>(m * stride + r)], -7.0f);
  }
}

TEST_F(Bf16Products, AreThoseOfPlainWeights) {
  ThreadPool pool(2);
  Bf16Scratch scratch;
  Rng rng(3);
  for (const std::int64_t cols : {1, 7, 32, 90, 576, 770, 1100}) {
    const std::int64_t rows = 45, count = 33;
    std::vector<float> w(static_cast<std::size_t>(rows * cols)), y(static_cast<std::size_t>(count * rows));
    for (float& v : w) v = static_cast<float>(rng.normal());
    const std::vector<std::uint16_t> plain = narrowed(w);
    const std::vector<float> x = random_rows(count, cols);
    const Bf16Product product{nullptr, plain.data(), {y.data(), count, rows}};
    matmul_bf16({x.data(), count, cols}, {&product, 1}, scratch, pool);
    expect_products(y, rows, x, w, count, rows, cols, std::to_string(cols) + " columns");
  }
}

/// Alone, among others, beside other products, of any number of threads: the same bits.
TEST_F(Bf16Products, RowsDoNotDependOnTheirCompany) {
  HugeArena arena;
  ThreadPool one(1), three(3);
  const std::int64_t rows = 300, cols = 1536, count = 530;
  const TiledWeight tiles = tile_weight(WeightType::q4_k, random_blocks(WeightType::q4_k, rows, cols).data(),
                                        rows, cols, arena, one);
  const std::vector<float> x = random_rows(count, cols);
  const std::vector<std::uint16_t> plain = narrowed(random_rows(40, cols));
  Bf16Scratch scratch;
  const auto multiply = [&](std::int64_t first, std::int64_t some, ThreadPool& pool) {
    std::vector<float> y(static_cast<std::size_t>(some * rows)), other(static_cast<std::size_t>(some * 40));
    const Bf16Product both[] = {{nullptr, plain.data(), {other.data(), some, 40}},
                                {&tiles, nullptr, {y.data(), some, rows}}};
    matmul_bf16({x.data() + first * cols, some, cols}, both, scratch, pool);
    return y;
  };
  const std::vector<float> all = multiply(0, count, one);
  EXPECT_EQ(multiply(0, count, three), all);
  for (const auto& [first, some] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1}, {529, 1}, {16, 17}, {500, 30}, {1, 513}})
    EXPECT_TRUE(std::ranges::equal(multiply(first, some, three),
                                   std::span(all).subspan(static_cast<std::size_t>(first * rows),
                                                          static_cast<std::size_t>(some * rows))))
        << some << " rows from " << first;
}

/// Rows of x that products take in an order of their own, some twice, as experts do, have the bits that they have in place.
TEST_F(Bf16Products, TakeRowsInAnOrder) {
  ThreadPool pool(2);
  HugeArena arena;
  Bf16Scratch scratch;
  const std::int64_t rows = 40, cols = 256;
  const TiledWeight tiles = tile_weight(WeightType::q6_k, random_blocks(WeightType::q6_k, rows, cols).data(),
                                        rows, cols, arena, pool);
  const std::vector<std::uint16_t> plain = narrowed(random_rows(rows, cols));
  const std::vector<float> x = random_rows(70, cols);
  std::vector<float> in_place(70 * rows), in_place_plain(70 * rows);
  const Bf16Product all[] = {{&tiles, nullptr, {in_place.data(), 70, rows}},
                             {nullptr, plain.data(), {in_place_plain.data(), 70, rows}}};
  matmul_bf16({x.data(), 70, cols}, all, scratch, pool);

  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < 100; ++i) order.push_back(i * 37 % 70);
  std::vector<float> y(100 * rows, -7.0f), z = y;
  std::vector<Bf16Product> parts;
  // Ranges as experts have: of one row, of several blocks, some for two weights, one for none.
  for (const auto& [first, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1}, {1, 40}, {41, 0}, {41, 16}, {57, 43}}) {
    parts.push_back({&tiles, nullptr, {y.data() + first * rows, count, rows}, first});
    parts.push_back({nullptr, plain.data(), {z.data() + first * rows, count, rows}, first});
  }
  matmul_bf16({x.data(), 70, cols}, parts, scratch, pool, order);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto row = [&](const std::vector<float>& of, std::int64_t m) {
      return std::span(of).subspan(static_cast<std::size_t>(m * rows), static_cast<std::size_t>(rows));
    };
    EXPECT_TRUE(std::ranges::equal(row(y, static_cast<std::int64_t>(i)), row(in_place, order[i]))) << i;
    EXPECT_TRUE(std::ranges::equal(row(z, static_cast<std::int64_t>(i)), row(in_place_plain, order[i]))) << i;
  }
}

/// What is not finite reaches the products of its row alone.
TEST_F(Bf16Products, WhatIsNotFiniteStaysInItsRow) {
  ThreadPool pool(1);
  Bf16Scratch scratch;
  const std::int64_t rows = 20, cols = 64, count = 40;
  const std::vector<std::uint16_t> plain =
      narrowed(std::vector<float>(static_cast<std::size_t>(rows * cols), 1.0f));
  std::vector<float> x(static_cast<std::size_t>(count * cols), 1.0f),
      y(static_cast<std::size_t>(count * rows));
  x[5 * 64 + 3] = std::nanf("");
  x[17 * 64 + 63] = std::numeric_limits<float>::infinity();
  x[30 * 64] = -3e38f;
  const Bf16Product product{nullptr, plain.data(), {y.data(), count, rows}};
  matmul_bf16({x.data(), count, cols}, {&product, 1}, scratch, pool);
  for (std::int64_t m = 0; m < count; ++m) {
    const float found = y[static_cast<std::size_t>(m * rows + 19)];
    if (m == 5)
      EXPECT_TRUE(std::isnan(found));
    else if (m == 17)
      EXPECT_EQ(found, std::numeric_limits<float>::infinity());
    else if (m == 30)
      EXPECT_LT(found, -2.9e38f);
    else
      EXPECT_EQ(found, 64.0f) << m;
  }
}

TEST_F(Bf16Products, OfNoRowsAreNone) {
  ThreadPool pool(1);
  Bf16Scratch scratch;
  const std::uint16_t plain[32] = {};
  const Bf16Product product{nullptr, plain, {nullptr, 0, 1}};
  matmul_bf16({nullptr, 0, 32}, {&product, 1}, scratch, pool);
}

}  // namespace
}  // namespace lode
