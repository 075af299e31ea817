// SPDX-License-Identifier: Apache-2.0
// One product of float32 matrices for each of many small networks, in one launch.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Matrices of all pairs (outer, inner), row-major, so many numbers from one to the next.
template <class T>
struct ManyMatrices {
  T* data = nullptr;
  std::int64_t row = 0;               ///< numbers from one stored row to the next
  std::int64_t outer = 0, inner = 0;  ///< from one matrix to the next
};

/// Which dimension of a product is as long as the outer's count says, where there are counts.
enum class CountedDimension { m, n, k };

/// c[m, n] = op(a)[m, k] op(b)[k, n] for each of outer x inner pairs. What lies behind a counted dimension is
/// neither read nor written.
struct ManyProducts {
  ManyMatrices<const float> a, b;
  ManyMatrices<float> c;
  std::int64_t outer = 1, inner = 1;
  std::int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;             ///< a is stored [k, m]
  bool b_transposed = false;             ///< b is stored [n, k]
  const std::int32_t* counts = nullptr;  ///< [outer], at most the dimension's own length
  CountedDimension counted = CountedDimension::m;
  /// Unless 0: k is cut into parts_of(k) parts; c holds the first one's sum, and the next one's stands `part`
  /// numbers further on. Parts behind a counted k are 0.
  std::int64_t part = 0;
};

inline constexpr std::int64_t kPartLength = 512;
constexpr std::int64_t parts_of(std::int64_t k) {
  return (k + kPartLength - 1) / kPartLength;
}

/// In float32; every output is one chain of fused multiply-adds in ascending order of k, whatever the shape
/// and however many pairs there are.
void multiply_many(const ManyProducts& products, StreamHandle stream);

}  // namespace lode::cuda
