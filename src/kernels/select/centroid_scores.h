// SPDX-License-Identifier: Apache-2.0
// Contract of the products of queries with centroids, and of what a cluster's spread adds to them. One table
// per instruction set, chosen as kernels() is.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lodestone/types.h"

namespace lode {

/// Queries of one call.
inline constexpr int kMostNodeQueries = 8;
/// Largest spread of a logit: its square is still a float.
inline constexpr float kLargestSpread = 1e15f;

/// Consecutive nodes of a level of clusters.
struct NodeRows {
  DType type = DType::q8;
  const std::byte* centroids = nullptr;  // [n, d] of `type`
  const float* scales = nullptr;         // [n] of centroids in 8 bits; null: 1
  const std::byte* spreads = nullptr;    // [n, ceil(d / 2)] in 8 bits, one for each plane; null: none
  const float* spread_scales = nullptr;  // [n]
  const float* most = nullptr;           // [n] deviations that the largest of a node's keys is off
  std::int64_t count = 0, d = 0;         ///< d <= kMaxHeadDim

  std::int64_t planes() const { return (d + 1) / 2; }
};

/// All are noexcept and allocate nothing. The result of one query with one node does not depend on which
/// others share the call.
struct CentroidScoreKernels {
  std::string_view name;

  /// z[r, i] = scale_i (q_r . c_i), and with spreads + b (s - b / 2), where s^2 = spread_scale_i sum over the
  /// planes (j, j + planes) of (q_j^2 + q_{j + planes}^2) spread_ij, at most kLargestSpread^2 (where it is no
  /// number as well), and b = min(s, most_i). 1 <= queries <= kMostNodeQueries.
  void (*score)(const float* q /*[queries, d]*/, int queries, const NodeRows& nodes,
                float* z /*[queries, stride]*/, std::int64_t stride) noexcept;
};

/// The table that goes with kernels().
const CentroidScoreKernels& centroid_score_kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const CentroidScoreKernels* const> supported_centroid_score_kernels();

}  // namespace lode
