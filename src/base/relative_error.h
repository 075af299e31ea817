// SPDX-License-Identifier: Apache-2.0
// How far numbers are from those that they stand for.
#pragma once

#include <cmath>
#include <cstdint>

namespace lode {

/// |a - exact| / |exact| over n numbers; 0 when they are equal.
inline double relative_error(const float* a, const float* exact, std::int64_t n) {
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    difference += (static_cast<double>(a[i]) - exact[i]) * (static_cast<double>(a[i]) - exact[i]);
    norm += static_cast<double>(exact[i]) * exact[i];
  }
  return difference == 0 ? 0.0 : std::sqrt(difference / norm);
}

}  // namespace lode
