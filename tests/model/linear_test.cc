// SPDX-License-Identifier: Apache-2.0
// Linear layers over a batch: which rows go through which product, and that company changes no bit.
#include "model/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/bf16_product.h"
#include "kernels/blocks/quantise.h"
#include "kernels/kernels.h"

namespace lode {
namespace {

constexpr std::int64_t kCols = 768, kOut = 70;

std::vector<float> random_numbers(std::int64_t n) {
  Rng rng(static_cast<std::uint64_t>(n));
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = static_cast<float>(rng.normal());
  return x;
}

/// Rows of one sequence in a step.
struct Part {
  std::int64_t count;
  bool narrow, exact;
};

class LinearLayersOfABatch : public testing::Test {
 protected:
  LinearLayersOfABatch() {
    const std::vector<float> numbers = random_numbers(kOut * kCols);
    for (const DType type : {DType::f32, DType::bf16}) {
      std::vector<std::byte>& bytes =
          bytes_.emplace_back(numbers.size() * static_cast<std::size_t>(bytes_of(type)));
      kernels().narrow(numbers.data(), std::ssize(numbers), type, bytes.data());
      weights_.push_back({bytes.data(), weight_type_of(type), kOut, kCols});
    }
    std::vector<std::byte>& blocks =
        bytes_.emplace_back(static_cast<std::size_t>(bytes_of(WeightType::q8_0, kOut * kCols)));
    quantise(WeightType::q8_0, numbers.data(), kOut * kCols, blocks.data());
    weights_.push_back({blocks.data(), WeightType::q8_0, kOut, kCols});
    weights_.push_back({blocks.data(), WeightType::q8_0, kOut, kCols,
                        std::make_shared<LazyTiles>(std::make_shared<HugeArena>())});
  }

  /// Products of rows of x with all weights, in one call.
  std::vector<std::vector<float>> multiply(const std::vector<float>& x, std::span<const Part> parts) {
    LinearLayers linear(pool_);
    std::int64_t rows = 0;
    for (const Part& p : parts) linear.add_rows(p.count, p.narrow, p.exact), rows += p.count;
    const std::vector<float> nothing(static_cast<std::size_t>(rows * kOut), std::nanf(""));
    std::vector<std::vector<float>> y(weights_.size() + 1, nothing);  // the last: of bf16, exact
    linear(x, {{&weights_[0], nullptr, &y[0]},
               {&weights_[1], nullptr, &y[1]},
               {&weights_[2], nullptr, &y[2]},
               {&weights_[3], nullptr, &y[3]},
               {&weights_[1], nullptr, &y[4], true}});
    return y;
  }

  ThreadPool pool_{2};
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<Weight> weights_;  // f32, bf16, Q8_0 as in a file, Q8_0 in tiles
};

TEST_F(LinearLayersOfABatch, RowsHaveTheBitsThatTheyHaveAlone) {
  const std::vector<Part> parts = {{3, true, false},  {40, false, false}, {33, false, false},
                                   {5, false, false}, {50, false, true},  {2, true, false},
                                   {32, false, false}};
  std::int64_t rows = 0;
  for (const Part& p : parts) rows += p.count;
  const std::vector<float> x = random_numbers(rows * kCols);
  const auto together = multiply(x, parts);
  std::int64_t first = 0;
  for (const Part& p : parts) {
    const std::vector<float> own(x.begin() + first * kCols, x.begin() + (first + p.count) * kCols);
    const auto alone = multiply(own, {&p, 1});
    for (std::size_t w = 0; w < alone.size(); ++w)
      EXPECT_TRUE(std::equal(alone[w].begin(), alone[w].end(), together[w].begin() + first * kOut))
          << "product " << w << ", rows from " << first;
    first += p.count;
  }
}

/// Rows of several sequences side by side, as an expert has them: of every weight as each by itself.
TEST_F(LinearLayersOfABatch, NeighboursOfOneWeightHaveTheBitsThatTheyHaveAlone) {
  const std::vector<std::int64_t> counts = {1, 40, 7, 33};
  const std::vector<float> x = random_numbers(81 * kCols);
  for (const Weight& w : weights_) {
    LinearLayers linear(pool_);
    std::vector<float> together(81 * kOut, std::nanf("")), alone = together;
    std::vector<RowsProduct> products;
    std::int64_t first = 0;
    for (const std::int64_t count : counts) {
      const bool bf16 = bf16_product_kernels() != nullptr && count != 7;
      products.push_back({&w, first, count, together.data() + first * kOut, false, bf16});
      const RowsProduct own = {&w, first, count, alone.data() + first * kOut, false, bf16};
      linear.grouped(x, 81, {&own, 1});
      first += count;
    }
    linear.grouped(x, 81, products);
    EXPECT_EQ(together, alone) << name_of(w.type);
  }
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    error += std::pow(double{a[i]} - double{b[i]}, 2), size += std::pow(double{b[i]}, 2);
  return std::sqrt(error / size);
}

TEST_F(LinearLayersOfABatch, ExactRowsAreNotRounded) {
  const std::vector<float> x = random_numbers(64 * kCols);
  const Part exact = {64, false, true}, rounded = {64, false, false};
  const auto y = multiply(x, {&exact, 1}), z = multiply(x, {&rounded, 1});
  std::vector<float> expected(y[1].size());
  matmul({x.data(), 64, kCols}, weights_[1].data, DType::bf16, kOut, {expected.data(), 64, kOut}, pool_);
  EXPECT_EQ(y[1], expected);
  EXPECT_EQ(z[0], y[0]) << "weights of 32 bits are never rounded";
  EXPECT_EQ(z[2], y[2]) << "nor those without tiles";
  EXPECT_EQ(z[4], expected) << "an exact product";
  for (const std::size_t w : {1, 3}) {
    const double error = relative_error(z[w], y[w]);
    EXPECT_LT(error, 4e-3) << name_of(weights_[w].type);
    if (bf16_product_kernels() != nullptr) {
      EXPECT_GT(error, 1e-4) << "many rows take the matrix unit";
    }
  }
}

}  // namespace
}  // namespace lode
