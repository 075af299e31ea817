// SPDX-License-Identifier: Apache-2.0
// The packed sums in plain C++: the specification of the others.
#include <algorithm>

#include "kernels/select/packed_sum.h"

namespace lode {
namespace {

constexpr int kWords = 16;

void sum_nibbles(const float* tables, int queries, int parts, const std::uint32_t* codes, std::int64_t blocks,
                 float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += std::int64_t{parts} * kWords) {
    for (int q = 0; q < queries; ++q) {
      float* const sums = scores + q * stride + block * kPackedBlock;
      std::fill_n(sums, kPackedBlock, 0.0f);
      for (int part = 0; part < parts; ++part) {
        const float* const table = tables + (std::int64_t{q} * parts + part) * 16;
        const std::uint32_t* const words = codes + std::int64_t{part} * kWords;
        for (int i = 0; i < kPackedBlock; ++i)
          sums[i] += table[words[i % kWords] >> (4 * (i / kWords)) & 15u];
      }
    }
  }
}

void sum_bytes(const float* tables, int queries, int parts, const std::uint8_t* codes, std::int64_t blocks,
               float* scores, std::int64_t stride) noexcept {
  for (std::int64_t block = 0; block < blocks; ++block, codes += parts * kPackedBlock) {
    for (int q = 0; q < queries; ++q) {
      float* const sums = scores + q * stride + block * kPackedBlock;
      std::fill_n(sums, kPackedBlock, 0.0f);
      for (int part = 0; part < parts; ++part) {
        const float* const table = tables + (std::int64_t{q} * parts + part) * 256;
        for (int i = 0; i < kPackedBlock; ++i) sums[i] += table[codes[part * kPackedBlock + i]];
      }
    }
  }
}

}  // namespace

extern const PackedSumKernels kScalarPackedSums;
constinit const PackedSumKernels kScalarPackedSums = {"scalar", sum_nibbles, sum_bytes};

}  // namespace lode
