// SPDX-License-Identifier: Apache-2.0
// Random block-quantised weights for tests: the blocks of a file, the tiles on the device, and the values in float64.
#pragma once

#include <cmath>
#include <random>
#include <string_view>

#include "kernels/cuda/linear/linear.h"
#include "reference.h"

namespace lode::cuda::test {

using enum TileFormat;

inline constexpr TileFormat kFormats[] = {q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, mxfp4};

inline std::string_view name_of_format(TileFormat f) {
  constexpr std::string_view kNames[] = {"none", "q4_0", "q4_1", "q5_0", "q5_1",
                                         "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4"};
  return kNames[static_cast<int>(f)];
}

inline double half(const std::uint8_t* at) {
  return static_cast<double>(to_float(f16{static_cast<std::uint16_t>(at[0] | at[1] << 8)}));
}

/// The values of one block, as ggml's description of the formats gives them.
inline std::vector<double> decode_small(TileFormat f, const std::uint8_t* b) {
  std::vector<double> y(32);
  const bool five = f == q5_0 || f == q5_1, minima = f == q4_1 || f == q5_1;
  const double d = half(b), m = minima ? half(b + 2) : 0.0;
  const std::uint8_t* const high = b + (minima ? 4 : 2);
  const std::uint8_t* const codes = high + (five ? 4 : 0);
  for (int j = 0; j < 32; ++j) {
    if (f == q8_0) {
      y[static_cast<std::size_t>(j)] = d * static_cast<std::int8_t>(b[2 + j]);
      continue;
    }
    int q = codes[j % 16] >> (j < 16 ? 0 : 4) & 15;
    if (five) q |= (high[j / 8] >> j % 8 & 1) << 4;
    y[static_cast<std::size_t>(j)] = minima ? d * q + m : d * (q - (five ? 16 : 8));
  }
  return y;
}

inline std::vector<double> decode_k(TileFormat f, const std::uint8_t* b) {
  std::vector<double> y(256);
  const double d = half(b), dmin = half(b + 2);
  const std::uint8_t *s = b + 4, *high = b + 16, *codes = b + (f == q5_k ? 48 : 16);
  for (int c = 0; c < 256; ++c) {
    const int j = c / 32;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4,
              minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    int q = codes[c / 64 * 32 + c % 32] >> (c % 64 < 32 ? 0 : 4) & 15;
    if (f == q5_k) q |= (high[c % 32] >> j & 1) << 4;
    y[static_cast<std::size_t>(c)] = d * scale * q - dmin * minimum;
  }
  return y;
}

inline std::vector<double> decode_q6(const std::uint8_t* b) {
  std::vector<double> y(256);
  const double d = half(b + 208);
  for (int n = 0; n < 2; ++n) {
    for (int l = 0; l < 32; ++l) {
      const std::uint8_t *low = b + n * 64, *high = b + 128 + n * 32;
      const auto* scales = reinterpret_cast<const std::int8_t*>(b + 192 + n * 8);
      const int q[4] = {(low[l] & 15) | (high[l] & 3) << 4, (low[l + 32] & 15) | (high[l] >> 2 & 3) << 4,
                        low[l] >> 4 | (high[l] >> 4 & 3) << 4, low[l + 32] >> 4 | high[l] >> 6 << 4};
      for (int k = 0; k < 4; ++k)
        y[static_cast<std::size_t>(n * 128 + k * 32 + l)] = d * scales[k * 2 + l / 16] * (q[k] - 32);
    }
  }
  return y;
}

inline std::vector<double> decode_mxfp4(const std::uint8_t* b) {
  constexpr double kNumbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<double> y(32);
  for (int j = 0; j < 32; ++j) {
    const int code = b[1 + j % 16] >> (j < 16 ? 0 : 4) & 15;
    y[static_cast<std::size_t>(j)] = std::ldexp(kNumbers[code & 7], b[0] - 127) * (code < 8 ? 1 : -1);
  }
  return y;
}

inline std::vector<double> decode(TileFormat f, const std::uint8_t* block) {
  if (f == mxfp4) return decode_mxfp4(block);
  return f == q6_k ? decode_q6(block) : f == q4_k || f == q5_k ? decode_k(f, block) : decode_small(f, block);
}

/// Random blocks with scales of a given size, on the device as tiles, and the values in float64.
struct TestTiles {
  TestTiles(TileFormat format, std::int64_t rows, std::int64_t cols, unsigned seed, double spread)
      : tiles(tiled_bytes(format, rows, cols), "tiles") {
    std::mt19937 engine(seed);
    const std::int64_t bytes = block_bytes(format), count = rows * cols / block_columns(format);
    blocks.resize(static_cast<std::size_t>(count * bytes));
    for (std::uint8_t& b : blocks) b = static_cast<std::uint8_t>(engine());
    std::uniform_real_distribution<double> draw(0.2, 1.0);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint8_t* const at = blocks.data() + i * bytes;
      const auto put = [&](int where, double x) {
        const std::uint16_t bits = to_f16(static_cast<float>(x)).bits;
        at[where] = static_cast<std::uint8_t>(bits), at[where + 1] = static_cast<std::uint8_t>(bits >> 8);
      };
      // Uniform codes of b bits spread 2^b / 3.5 about their middle; scales of 6 or 7 bits are half as large.
      if (format == q6_k) put(208, draw(engine) * spread / 18 / 64);
      if (format == q4_k || format == q5_k) {
        const double width = format == q4_k ? 4.6 : 9.2;
        put(0, draw(engine) * spread / width / 32);
        put(2, draw(engine) * spread / 32);
      }
      if (format == q8_0) put(0, draw(engine) * spread / 74);
      if (format == q4_0 || format == q4_1) put(0, draw(engine) * spread / 4.6);
      if (format == q5_0 || format == q5_1) put(0, draw(engine) * spread / 9.2);
      if (format == mxfp4)
        at[0] = static_cast<std::uint8_t>(127 + std::lround(std::log2(draw(engine) * spread / 2.9)));
      if (format == q4_1 || format == q5_1) put(2, -draw(engine) * spread * 1.7);
      const std::vector<double> some = decode(format, at);
      values.insert(values.end(), some.begin(), some.end());
    }
    const OnDevice<std::uint8_t> raw(blocks);
    pack_tiles(raw.get(), format, rows, cols, tiles.as<void>(), nullptr);
    cudaDeviceSynchronize();
    weight = {tiles.as<void>(), DType::bf16, rows, cols, format};
  }
  std::vector<std::uint8_t> blocks;
  std::vector<double> values;  // [rows, cols]
  Buffer tiles;
  DeviceWeight weight;
};

}  // namespace lode::cuda::test
