// SPDX-License-Identifier: Apache-2.0
// Keys and values of layers that differ, some of which show the memory of earlier ones, as a sequence grows.
#include "kernels/cuda/device/kv_range.h"

#include <gtest/gtest.h>

#include "base/out_of_memory.h"
#include "play.h"

namespace lode {
namespace {

using Part = cuda::KvRange::Part;

constexpr std::int64_t kMost = 20000;
constexpr int kLayers = 5;

struct UnlikeLayers {
  cuda::Stream stream;
  // Layers 0 and 1 have heads of two shapes; 2 shows the first, 3 and 4 the second.
  cuda::KvRange range{{1, 128, DType::f32, 0},
                      kLayers,
                      kMost,
                      {{2, 32, 0}, {1, 128, 1}, {2, 32, 0}, {1, 128, 1}, {1, 128, 1}}};

  static float number(int layer, Part part, std::int64_t row) {
    return static_cast<float>(4 * row + 2 * layer + (part == Part::v));
  }
  void write(std::int64_t begin, std::int64_t end) {
    for (const int layer : {0, 1}) {
      const auto layout = range.layout(layer);
      for (const Part part : {Part::k, Part::v}) {
        std::vector<float> rows;
        for (std::int64_t row = begin; row < end; ++row)
          rows.insert(rows.end(), static_cast<std::size_t>(layout.head_dim), number(layer, part, row));
        for (int head = 0; head < layout.kv_heads; ++head)
          range.to_device(layer, head, part, begin, end, rows.data(), stream.get());
        stream.synchronize();
      }
    }
  }
  void expect_rows(std::int64_t end) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      const int own = layer % 2 == 0 && layer < 4 ? 0 : 1;
      EXPECT_EQ(range.has_rows(layer), layer < 2);
      const auto layout = range.layout(layer);
      std::vector<float> rows(static_cast<std::size_t>(end * layout.head_dim));
      for (const Part part : {Part::k, Part::v}) {
        range.to_host(layer, layout.kv_heads - 1, part, 0, end, rows.data(), stream.get());
        stream.synchronize();
        for (std::int64_t row = 0; row < end; ++row)
          ASSERT_EQ(rows[static_cast<std::size_t>((row + 1) * layout.head_dim - 1)], number(own, part, row))
              << layer << ' ' << row;
      }
    }
  }
};

TEST(KvRange, LayersShowWhatOthersHaveAsTheyGrow) {
  const std::int64_t before = cuda::play_memory(cuda::kPlayedMemory);
  {
    UnlikeLayers layers;
    std::int64_t tokens = 0;
    for (const std::int64_t more : {1, 700, 3, 5000, 9000}) {
      layers.range.back(tokens + more);
      layers.write(tokens, tokens + more);
      layers.expect_rows(tokens += more);
    }
    EXPECT_EQ(cuda::play_memory(cuda::kPlayedMemory) - before, layers.range.backed_bytes());
    EXPECT_GE(layers.range.backed_bytes(), tokens * 3 * 128 * 4) << "each row once";
  }
  EXPECT_EQ(cuda::play_memory(cuda::kPlayedMemory), before);
}

TEST(KvRange, GrowthWithoutMemoryLeavesEveryLayerAsItWas) {
  UnlikeLayers layers;
  layers.range.back(1000);
  layers.write(0, 1000);
  const std::int64_t bytes = layers.range.backed_bytes(), used = cuda::play_memory(cuda::kPlayedMemory);
  cuda::play_memory(used + layers.range.layout(0).layer_bytes(kMost));  // for the first layer alone
  EXPECT_THROW(layers.range.back(kMost), OutOfDeviceMemory);
  EXPECT_EQ(cuda::play_memory(cuda::kPlayedMemory), used);
  EXPECT_EQ(layers.range.backed_bytes(), bytes);
  layers.expect_rows(1000);
  layers.range.back(kMost);
  layers.write(1000, kMost);
  layers.expect_rows(kMost);
}

}  // namespace
}  // namespace lode
