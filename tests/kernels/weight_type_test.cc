// SPDX-License-Identifier: Apache-2.0
// Types of weights: their sizes, and that blocks mean what GGUF's reference reader says, to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/file.h"
#include "kernels/dequantise.h"
#include "support/source_dir.h"

namespace lode {
namespace {

TEST(WeightType, NamesAndNumbersOfGgufLeadBack) {
  for (const WeightLayout& layout : weight_layouts()) {
    EXPECT_EQ(&layout_of(layout.type), &layout);
    EXPECT_EQ(find_gguf_type(layout.gguf_type), layout.type);
    EXPECT_EQ(find_weight_type(layout.name), layout.type);
    EXPECT_EQ(bytes_of(layout.type, 3 * layout.block), 3 * layout.block_bytes);
    EXPECT_EQ(is_plain(layout.type), layout.block == 1);
  }
  EXPECT_EQ(find_weight_type("q4_k"), WeightType::q4_k);
  EXPECT_EQ(find_weight_type("Q4_K_M"), std::nullopt);
  EXPECT_EQ(find_weight_type(""), std::nullopt);
  EXPECT_EQ(find_gguf_type(4), std::nullopt);
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    EXPECT_EQ(layout_of(weight_type_of(type)).block_bytes, bytes_of(type));
  }
}

/// tests/golden/make_weight_type_goldens.py wrote blocks and numbers of each type in turn.
TEST(WeightType, BlocksMeanWhatTheReferenceReads) {
  const MappedFile file(source_dir() / "tests/golden/weight_types.bin");
  const std::byte* at = file.bytes().data();
  for (const auto& [type, name, number, block, block_bytes] : weight_layouts()) {
    const std::int64_t n = std::max<std::int64_t>(2, 384 / block) * block;
    std::vector<float> expected(static_cast<std::size_t>(n)), found(expected.size());
    const std::byte* numbers = at + bytes_of(type, n);
    ASSERT_LE(numbers + n * 4, file.bytes().data() + file.bytes().size());
    std::memcpy(expected.data(), numbers, expected.size() * sizeof(float));
    dequantise(type, at, n, found.data());
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(found[i]), std::bit_cast<std::uint32_t>(expected[i]))
          << name << " number " << i << ": " << found[i] << ", expected " << expected[i];
    }
    at = numbers + n * 4;
  }
  EXPECT_EQ(at, file.bytes().data() + file.bytes().size());
}

TEST(WeightType, ScalesThatAreNotFiniteAreSeen) {
  for (const auto& [type, name, number, block, block_bytes] : weight_layouts()) {
    if (is_plain(type)) continue;
    std::vector<std::byte> data(static_cast<std::size_t>(3 * block_bytes));
    EXPECT_TRUE(blocks_finite(type, data.data(), 3 * block)) << name;
    std::vector<float> numbers(static_cast<std::size_t>(3 * block));
    for (std::size_t at = 0; at < data.size(); ++at) {  // each byte in turn may be the high one of a scale
      data[at] = std::byte{0x7c};
      dequantise(type, data.data(), 3 * block, numbers.data());
      const bool finite =
          std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); });
      EXPECT_TRUE(finite || !blocks_finite(type, data.data(), 3 * block)) << name << " byte " << at;
      data[at] = std::byte{0};
    }
  }
}

}  // namespace
}  // namespace lode
