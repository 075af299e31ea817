// SPDX-License-Identifier: Apache-2.0
// Block-quantised weights and activations to multiply them with.
#pragma once

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "kernels/dequantise.h"
#include "kernels/weight_type.h"

namespace lode {

/// Random blocks whose scales are finite.
inline std::vector<std::byte> random_blocks(WeightType type, std::int64_t rows, std::int64_t cols) {
  Rng rng(static_cast<std::uint64_t>(type) + 100);
  const WeightLayout& layout = layout_of(type);
  std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of(type, rows * cols)));
  for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(layout.block_bytes)) {
    do {
      for (std::int64_t i = 0; i < layout.block_bytes; ++i)
        bytes[at + static_cast<std::size_t>(i)] = static_cast<std::byte>(rng.below(256));
      // Exponents near 0, so that sums of float32 do not overflow.
      if (type == WeightType::mxfp4) bytes[at] = static_cast<std::byte>(120 + rng.below(16));
    } while (!blocks_finite(type, bytes.data() + at, layout.block));
  }
  return bytes;
}

inline std::vector<float> random_rows(std::int64_t rows, std::int64_t cols) {
  Rng rng(5);
  std::vector<float> x(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(rng.normal() * std::pow(10.0, static_cast<double>(i / 32 % 5) - 2.0));
  return x;
}

}  // namespace lode
