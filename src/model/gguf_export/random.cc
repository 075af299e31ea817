// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_export/random.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/blocks/quantise.h"
#include "kernels/dequantise.h"
#include "kernels/tiled_weight.h"

namespace lode {

namespace {

/// The minimum that centres a type's codes, in scales.
float centre_of(WeightType type) {
  const TileFormat format = tile_format(type);
  if (format.minimum == TileFormat::Minimum::none) return 0;
  const float middle = 0.5f * static_cast<float>((1 << format.bits) - 1);
  return format.minimum == TileFormat::Minimum::added ? -middle : middle;
}

/// Sets a block's scales so that its numbers have about the wanted size.
void set_scales(WeightType type, float size, std::byte* block) {
  if (type == WeightType::mxfp4) {
    block[0] = static_cast<std::byte>(std::clamp(std::ilogb(size / 5) + 128, 1, 254));
    return;
  }
  const auto put = [&](float scale) {
    const auto places = scale_places(type);
    const std::uint16_t d = to_f16(scale).bits, m = to_f16(scale * centre_of(type)).bits;
    std::memcpy(block + places[0], &d, 2);
    if (places[1] >= 0) std::memcpy(block + places[1], &m, 2);
  };
  put(1.0f);
  std::vector<float> numbers(static_cast<std::size_t>(layout_of(type).block));
  dequantise(type, block, std::ssize(numbers), numbers.data());
  double square = 0;
  for (const float x : numbers) square += double{x} * double{x};
  put(size / static_cast<float>(std::sqrt(square / static_cast<double>(numbers.size())) + 1e-6));
}

}  // namespace

void fill_random(WeightType type, std::int64_t rows, std::int64_t cols, std::uint64_t seed,
                 std::span<std::byte> to, ThreadPool& pool) {
  const WeightLayout& layout = layout_of(type);
  const std::int64_t row_bytes = bytes_of(type, cols);
  const float size = 1.0f / std::sqrt(static_cast<float>(cols));
  pool.for_each(rows, [&](std::int64_t row, int) {
    Rng rng(hash_seed(seed, row));
    std::byte* const at = to.data() + row * row_bytes;
    if (is_plain(type)) {
      std::vector<float> numbers(static_cast<std::size_t>(cols));
      for (float& x : numbers) x = size * static_cast<float>(rng.normal());
      quantise(type, numbers.data(), cols, at);
      return;
    }
    for (std::int64_t i = 0; i < row_bytes; i += 8) {
      const std::uint64_t bits = rng.next();
      std::memcpy(at + i, &bits, static_cast<std::size_t>(std::min<std::int64_t>(8, row_bytes - i)));
    }
    for (std::int64_t i = 0; i < row_bytes; i += layout.block_bytes) set_scales(type, size, at + i);
  });
}

}  // namespace lode
