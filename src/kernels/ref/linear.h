// SPDX-License-Identifier: Apache-2.0
// Products, selection and assignment in float64: the specification of the kernels of the same names.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "lodestone/kv_view.h"

namespace lode::ref {

/// sum_k x[k] w[k] for a stored row of weights.
inline double dot(const float* x, const std::byte* w, DType type, std::int64_t k) {
  double sum = 0.0;
  for (std::int64_t c = 0; c < k; ++c) {
    const std::byte* at = w + c * bytes_of(type);
    const double element = type == DType::f32    ? double{*reinterpret_cast<const float*>(at)}
                           : type == DType::f16  ? double{to_float(*reinterpret_cast<const f16*>(at))}
                           : type == DType::bf16 ? double{to_float(*reinterpret_cast<const bf16*>(at))}
                                                 : double(*reinterpret_cast<const std::int8_t*>(at));
    sum += double{x[c]} * element;
  }
  return sum;
}

/// Positions of the k largest scores, ties to the higher position, rising; NaN counts as -inf.
inline std::vector<Position> top_k(std::span<const float> scores, std::int64_t k, Position offset) {
  std::vector<Position> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](Position i) {
    const float s = scores[static_cast<std::size_t>(i)];
    return std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
  };
  const auto before = [&](Position a, Position b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a > b; };
  std::sort(order.begin(), order.end(), before);
  order.resize(
      static_cast<std::size_t>(std::clamp<std::int64_t>(k, 0, static_cast<std::int64_t>(order.size()))));
  std::sort(order.begin(), order.end());
  for (Position& p : order) p += offset;
  return order;
}

/// Inner products of one point with every centroid.
inline std::vector<double> products(const float* x, const float* centroids, std::int64_t count, int d) {
  std::vector<double> all(static_cast<std::size_t>(count), 0.0);
  for (std::int64_t c = 0; c < count; ++c)
    for (int i = 0; i < d; ++i) all[static_cast<std::size_t>(c)] += double{x[i]} * centroids[c * d + i];
  return all;
}

}  // namespace lode::ref
