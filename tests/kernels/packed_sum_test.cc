// SPDX-License-Identifier: Apache-2.0
// Packed sums: every table adds what its codes name, in the order of the parts, to the bit.
#include "kernels/select/packed_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

class PackedSums : public testing::TestWithParam<const PackedSumKernels*> {};
INSTANTIATE_TEST_SUITE_P(Kernels, PackedSums, testing::ValuesIn(supported_packed_sum_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

/// Tables of numbers of all sizes, some infinite.
std::vector<float> tables_of(int count) {
  Rng rng(static_cast<std::uint64_t>(count));
  std::vector<float> tables(static_cast<std::size_t>(count));
  for (float& x : tables) {
    x = static_cast<float>(rng.normal() * std::pow(10.0, static_cast<double>(rng.below(9)) - 4.0));
    if (rng.below(500) == 0) x = std::numeric_limits<float>::infinity();
  }
  return tables;
}

constexpr std::int64_t kStride = 1000;

/// code(part, key) gives what each sum must be, to the bit.
void expect_sums(const std::vector<float>& tables, int queries, int parts, int levels, std::int64_t blocks,
                 const std::vector<float>& scores,
                 const std::function<std::uint32_t(int, std::int64_t)>& code) {
  for (int q = 0; q < queries; ++q) {
    for (std::int64_t i = 0; i < kStride; ++i) {
      float sum = -7.0f;  // what stands behind the last block stays
      if (i < blocks * kPackedBlock) {
        sum = 0.0f;
        for (int part = 0; part < parts; ++part)
          sum += tables[(static_cast<std::size_t>(q * parts + part)) * static_cast<std::size_t>(levels) +
                        code(part, i)];
      }
      ASSERT_EQ(std::bit_cast<std::uint32_t>(scores[static_cast<std::size_t>(q * kStride + i)]),
                std::bit_cast<std::uint32_t>(sum))
          << parts << " parts, query " << q << ", key " << i;
    }
  }
}

TEST_P(PackedSums, NibblesAddUp) {
  for (const int parts : {0, 1, 2, 8, 33}) {
    for (const int queries : {0, 1, 3}) {
      for (const std::int64_t blocks : {0, 1, 3}) {
        Rng rng(3);
        std::vector<std::uint32_t> codes(static_cast<std::size_t>(blocks * parts * 16 + 1));
        for (std::uint32_t& word : codes) word = static_cast<std::uint32_t>(rng.next());
        const std::vector<float> tables = tables_of(queries * parts * 16 + 1);
        std::vector<float> scores(static_cast<std::size_t>(queries * kStride), -7.0f);
        GetParam()->sum_nibbles(tables.data(), queries, parts, codes.data() + 1, blocks, scores.data(),
                                kStride);
        expect_sums(tables, queries, parts, 16, blocks, scores, [&](int part, std::int64_t i) {
          const std::int64_t word = ((i / 128) * parts + part) * 16 + i % 16;
          return codes[static_cast<std::size_t>(word + 1)] >> (4 * (i % 128 / 16)) & 15u;
        });
      }
    }
  }
}

TEST_P(PackedSums, BytesAddUp) {
  for (const int parts : {0, 1, 2, 8, 33}) {
    for (const int queries : {0, 1, 3}) {
      for (const std::int64_t blocks : {0, 1, 3}) {
        Rng rng(4);
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(blocks * parts * 128 + 1));
        for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(rng.next());
        const std::vector<float> tables = tables_of(queries * parts * 256 + 1);
        std::vector<float> scores(static_cast<std::size_t>(queries * kStride), -7.0f);
        GetParam()->sum_bytes(tables.data(), queries, parts, codes.data() + 1, blocks, scores.data(),
                              kStride);
        expect_sums(tables, queries, parts, 256, blocks, scores, [&](int part, std::int64_t i) {
          return std::uint32_t{
              codes[static_cast<std::size_t>(((i / 128) * parts + part) * 128 + i % 128 + 1)]};
        });
      }
    }
  }
}

}  // namespace
}  // namespace lode
