// SPDX-License-Identifier: Apache-2.0
// Scores of nodes, for whichever vec_*.h was included before: each node's numbers are read once, in one line,
// for up to four queries at a time, and what its spread adds is worked out while they are in registers.
#pragma once

#include "kernels/kernels.h"
#include "kernels/select/centroid_scores.h"

namespace lode {
namespace {

constexpr int kW = Vec::kLanes;
constexpr std::int64_t kNodeBlock = 128;  // that stay in the first-level cache for the next queries
constexpr std::int64_t kNodesAhead =
    4096;  // bytes; beyond the end of the page, where the machine by itself stops

/// Lane m * R + r becomes x_m . w_r, for M = kW / R vectors and rows: one chain of sums for each pair.
template <DType T, int M, int R>
LODE_INLINE Vec products(const float* x /*[M, k]*/, const std::byte* const (&w)[R], std::int64_t k) {
  static_assert(M * R == kW);
  Vec acc[kW];
  unroll<kW>([&](auto i) LODE_INLINE_LAMBDA { acc[i] = set1(0.0f); });
  const auto step = [&](auto load_row, auto load_x) LODE_INLINE_LAMBDA {
    Vec v[R];
    unroll<R>([&](auto r) LODE_INLINE_LAMBDA { v[r] = load_row(w[r]); });
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
      const Vec u = load_x(x + m * k);
      unroll<R>([&](auto r) LODE_INLINE_LAMBDA { acc[m * R + r] = fma(v[r], u, acc[m * R + r]); });
    });
  };
  std::int64_t c = 0;
  for (; c + kW <= k; c += kW)
    step([&](const std::byte* row) LODE_INLINE_LAMBDA { return load_as<T>(row + c * bytes_of(T)); },
         [&](const float* of) LODE_INLINE_LAMBDA { return load(of + c); });
  if (const int rest = static_cast<int>(k - c); rest > 0)
    step([&](const std::byte* row)
             LODE_INLINE_LAMBDA { return load_as_first<T>(row + c * bytes_of(T), rest); },
         [&](const float* of) LODE_INLINE_LAMBDA { return load_first(of + c, rest); });
  return sum_lanes(acc);
}

/// Rows i, ..., i + R - 1 of a matrix; behind the last one, that one again. Asks for what will follow.
template <int R>
LODE_INLINE void rows_at(const std::byte* rows, std::int64_t row_bytes, std::int64_t i, std::int64_t count,
                         const std::byte* (&at)[R]) {
  prefetch(rows + i * row_bytes + kNodesAhead, R * row_bytes);
  unroll<R>([&](auto r)
                LODE_INLINE_LAMBDA { at[r] = rows + (i + r < count ? i + r : count - 1) * row_bytes; });
}

/// Lane m * R + r becomes x[i + r]; behind the last one anything.
template <int R>
LODE_INLINE Vec numbers_at(const float* x, std::int64_t i, std::int64_t count) {
  if (i + R <= count) return load_repeated<R>(x + i);
  float rest[R] = {};
  for (std::int64_t r = 0; i + r < count; ++r) rest[r] = x[i + r];
  return load_repeated<R>(rest);
}

/// What a node's spread adds to a score whose variance it makes.
LODE_INLINE Vec of_spread(Vec variance, Vec most) {
  const Vec root = sqrt_of(variance), largest = set1(kLargestSpread);
  const Vec s = where_above(largest, root, root, largest);  // infinities and NaN become the largest
  const Vec below = where_above(most, s, s, most);
  return below * (s - set1(0.5f) * below);
}

/// Scores of M queries with nodes [begin, end).
template <DType T, int M>
LODE_NOINLINE void score_queries(const float* q, const float* squares /*[M, planes]*/, const NodeRows& nodes,
                                 std::int64_t begin, std::int64_t end, float* z, std::int64_t stride) {
  constexpr int R = kW / M;
  for (std::int64_t i = begin; i < end; i += R) {
    const std::byte* at[R];
    rows_at<R>(nodes.centroids, nodes.d * bytes_of(T), i, end, at);
    Vec score = products<T, M, R>(q, at, nodes.d);
    if (nodes.scales) score = score * numbers_at<R>(nodes.scales, i, end);
    if (nodes.spreads) {
      rows_at<R>(nodes.spreads, nodes.planes(), i, end, at);
      const Vec variance = products<DType::q8, M, R>(squares, at, nodes.planes());
      score = score + of_spread(variance * numbers_at<R>(nodes.spread_scales, i, end),
                                numbers_at<R>(nodes.most, i, end));
    }
    alignas(64) float lanes[kW];
    store(lanes, score);
    const int some = end - i < R ? static_cast<int>(end - i) : R;
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < some; ++r) z[m * stride + i + r] = lanes[m * R + r];
  }
}

/// Of a query's numbers, those of a plane together.
inline void squares_of(const float* q, std::int64_t d, float* squares /*[planes]*/) {
  const std::int64_t planes = (d + 1) / 2;
  for (std::int64_t j = 0; j < planes; ++j)
    squares[j] = q[j] * q[j] + (j + planes < d ? q[j + planes] * q[j + planes] : 0.0f);
}

/// body<M>(first query, nodes begin, end): the next M queries meet nodes that are in the first-level cache.
template <class Body>
LODE_INLINE void for_blocks(int queries, std::int64_t nodes, Body body) {
  for (std::int64_t begin = 0; begin < nodes; begin += kNodeBlock) {
    const std::int64_t end = begin + kNodeBlock < nodes ? begin + kNodeBlock : nodes;
    int m = 0;
    for (; m + 4 <= queries; m += 4) body.template operator()<4>(m, begin, end);
    for (; m + 2 <= queries; m += 2) body.template operator()<2>(m, begin, end);
    for (; m < queries; ++m) body.template operator()<1>(m, begin, end);
  }
}

template <DType T>
void score_typed(const float* q, int queries, const NodeRows& nodes, float* z, std::int64_t stride) {
  const std::int64_t planes = nodes.planes();
  alignas(64) float squares[kMostNodeQueries * (kMaxHeadDim + 1) / 2];  // [queries, planes]
  for (int m = 0; m < queries && nodes.spreads; ++m)
    squares_of(q + m * nodes.d, nodes.d, squares + m * planes);
  for_blocks(queries, nodes.count, [&]<int M>(int m, std::int64_t begin, std::int64_t end) {
    score_queries<T, M>(q + m * nodes.d, squares + m * planes, nodes, begin, end, z + m * stride, stride);
  });
}

void score(const float* q, int queries, const NodeRows& nodes, float* z, std::int64_t stride) noexcept {
  switch (nodes.type) {
    case DType::f32:
      return score_typed<DType::f32>(q, queries, nodes, z, stride);
    case DType::f16:
      return score_typed<DType::f16>(q, queries, nodes, z, stride);
    case DType::bf16:
      return score_typed<DType::bf16>(q, queries, nodes, z, stride);
    case DType::q8:
      return score_typed<DType::q8>(q, queries, nodes, z, stride);
    case DType::q4:  // of keys and values alone
      return;
  }
}

}  // namespace
}  // namespace lode
