// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/rng.h"

namespace lode::test {

/// Normally distributed, the same for a seed.
inline std::vector<float> normals(std::int64_t count, std::uint64_t seed, double scale = 1.0) {
  Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& value : x) value = static_cast<float>(scale * rng.normal());
  return x;
}

}  // namespace lode::test
