// SPDX-License-Identifier: Apache-2.0
// Encoders of blocks: errors within what the format allows, and inputs chosen to hurt.
#include "kernels/blocks/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "kernels/dequantise.h"

namespace lode {
namespace {

std::vector<float> back_and_forth(WeightType type, const std::vector<float>& x) {
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<std::byte> blocks(static_cast<std::size_t>(bytes_of(type, n)));
  std::vector<float> y(x.size());
  EXPECT_TRUE(quantise(type, x.data(), n, blocks.data())) << name_of(type);
  dequantise(type, blocks.data(), n, y.data());
  return y;
}

double relative_error(const std::vector<float>& x, const std::vector<float>& y) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(double{x[i]} - double{y[i]}, 2);
    size += std::pow(double{x[i]}, 2);
  }
  return std::sqrt(error / size);
}

std::vector<float> normals(std::size_t n) {
  Rng rng(3);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(0.02 * rng.normal());
  return x;
}

TEST(Quantise, NormalNumbersKeepMostOfThemselves) {
  const std::vector<float> x = normals(256 * 64);
  EXPECT_LT(relative_error(x, back_and_forth(WeightType::q8_0, x)), 0.006);
  EXPECT_LT(relative_error(x, back_and_forth(WeightType::q6_k, x)), 0.02);
  EXPECT_LT(relative_error(x, back_and_forth(WeightType::q4_k, x)), 0.08);
  EXPECT_LT(relative_error(x, back_and_forth(WeightType::bf16, x)), 0.003);
  EXPECT_LT(relative_error(x, back_and_forth(WeightType::f16, x)), 0.0004);
  EXPECT_EQ(x, back_and_forth(WeightType::f32, x));
}

TEST(Quantise, BlocksThatHurt) {
  for (const WeightType type : {WeightType::q8_0, WeightType::q4_k, WeightType::q6_k}) {
    const std::vector<float> zeros(256, 0.0f);
    EXPECT_EQ(back_and_forth(type, zeros), zeros);
    for (const float value : {1.0f, -1.0f, 1e-3f, 1e4f}) {  // constant blocks, of both signs
      const std::vector<float> same(256, value);
      EXPECT_LT(relative_error(same, back_and_forth(type, same)), 0.01) << name_of(type) << " " << value;
    }
    std::vector<float> spike(256, 0.0f);
    spike[77] = -3.0f;
    EXPECT_NEAR(back_and_forth(type, spike)[77], -3.0f, 0.05f) << name_of(type);
    const std::vector<float> tiny(256, 1e-30f);  // below the scales of f16: 0, not NaN
    for (const float y : back_and_forth(type, tiny)) EXPECT_NEAR(y, 0.0f, 1e-6f);
  }
}

TEST(Quantise, WhatCannotBeStoredIsRefused) {
  std::vector<std::byte> blocks(1024);
  for (const WeightType type : {WeightType::f16, WeightType::q8_0, WeightType::q4_k, WeightType::q6_k}) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), 3e38f}) {
      std::vector<float> x(256, 0.5f);
      x[100] = bad;
      EXPECT_FALSE(quantise(type, x.data(), 256, blocks.data())) << name_of(type) << " " << bad;
    }
  }
  EXPECT_FALSE(can_quantise(WeightType::q5_k));
}

}  // namespace
}  // namespace lode
