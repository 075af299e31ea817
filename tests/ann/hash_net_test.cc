// SPDX-License-Identifier: Apache-2.0
// Signatures of a network: the bits of its formula in float64, their order, and what zeros and NaN give.
#include "ann/hashing/hash_net.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>

#include "support/normals.h"

namespace lode {
namespace {

using test::normals;

HashLayer layer_of(std::int64_t in, std::int64_t out, const std::vector<float>& w, std::vector<float> bias) {
  const auto bytes = std::as_bytes(std::span(w));
  return {.in = in,
          .out = out,
          .type = DType::f32,
          .weight = {bytes.begin(), bytes.end()},
          .bias = std::move(bias)};
}

TEST(HashNet, BitsAreTheSignsOfItsOutputs) {
  for (const auto activation : {HashNet::Activation::silu, HashNet::Activation::relu}) {
    const std::vector<float> w0 = normals(24 * 20, 1), w1 = normals(64 * 24, 2), b0 = normals(24, 3),
                             b1 = normals(64, 4);
    const HashNet net({layer_of(20, 24, w0, b0), layer_of(24, 64, w1, b1)}, activation);
    EXPECT_EQ(net.words(), 2);
    EXPECT_EQ(net.bytes(), 4 * (24 * 20 + 64 * 24 + 24 + 64));
    const std::int64_t n = 37;
    const std::vector<float> x = normals(n * 20, 5);
    std::vector<std::uint32_t> all(static_cast<std::size_t>(n * 2));
    HashNet::Scratch scratch;
    net.encode(x.data(), n, all.data(), scratch);
    for (std::int64_t i = 0; i < n; ++i) {
      std::vector<std::uint32_t> alone(2);
      net.encode(x.data() + i * 20, 1, alone.data(), scratch);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + i * 2)) << "alone or with others";
      std::vector<double> hidden(24);
      for (std::size_t j = 0; j < 24; ++j) {
        double sum = b0[j];
        for (std::size_t k = 0; k < 20; ++k)
          sum += static_cast<double>(w0[j * 20 + k]) * x[static_cast<std::size_t>(i) * 20 + k];
        hidden[j] = activation == HashNet::Activation::relu ? std::max(0.0, sum) : sum / (1 + std::exp(-sum));
      }
      for (std::size_t j = 0; j < 64; ++j) {
        double sum = b1[j];
        for (std::size_t k = 0; k < 24; ++k) sum += static_cast<double>(w1[j * 24 + k]) * hidden[k];
        if (std::abs(sum) < 1e-4) continue;
        EXPECT_EQ(alone[j / 32] >> (j % 32) & 1u, sum > 0 ? 1u : 0u) << i << ", bit " << j;
      }
    }
  }
}

// Bit i is output i, the lowest bit of the first word first: files and devices rely on it.
TEST(HashNet, OrderOfBitsAndWhatIsNotAboveZero) {
  std::vector<float> identity(64 * 64, 0.0f);
  for (std::size_t i = 0; i < 64; ++i) identity[i * 64 + i] = 1.0f;
  const HashNet net({layer_of(64, 64, identity, {})}, HashNet::Activation::silu);
  HashNet::Scratch scratch;
  std::uint32_t signature[2];
  for (std::size_t i = 0; i < 64; ++i) {
    std::vector<float> x(64, -1.0f);
    x[i] = 1e-30f;
    net.encode(x.data(), 1, signature, scratch);
    EXPECT_EQ(signature[0] | std::uint64_t{signature[1]} << 32, std::uint64_t{1} << i);
  }
  for (const float value : {0.0f, -0.0f, std::nanf(""), -std::numeric_limits<float>::infinity()}) {
    const std::vector<float> x(64, value);
    net.encode(x.data(), 1, signature, scratch);
    EXPECT_EQ(signature[0] | signature[1], 0u) << value;
  }
}

TEST(HashNet, NoVectorsNoSignatures) {
  const HashNet net({layer_of(8, 32, normals(256, 1), {})}, HashNet::Activation::relu);
  HashNet::Scratch scratch;
  std::uint32_t untouched = 77;
  net.encode(nullptr, 0, &untouched, scratch);
  EXPECT_EQ(untouched, 77u);
}

}  // namespace
}  // namespace lode
