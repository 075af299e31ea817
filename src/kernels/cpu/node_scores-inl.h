// SPDX-License-Identifier: Apache-2.0
// Scores of nodes, for whichever vec_*.h was included before: each node's numbers are read once, in one line,
// for up to four queries at a time, and what its spread adds is worked out while they are in registers.
#pragma once

#include "kernels/kernels.h"
#include "kernels/node_scores.h"

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
      const Vec root = sqrt_of(variance * numbers_at<R>(nodes.spread_scales, i, end));
      const Vec largest = set1(kLargestSpread), most = numbers_at<R>(nodes.most, i, end);
      const Vec s = where_above(largest, root, root, largest);  // infinities and NaN become the largest
      const Vec below = where_above(most, s, s, most);
      score = score + below * (s - set1(0.5f) * below);
    }
    alignas(64) float lanes[kW];
    store(lanes, score);
    const int some = end - i < R ? static_cast<int>(end - i) : R;
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < some; ++r) z[m * stride + i + r] = lanes[m * R + r];
  }
}

template <DType T>
void score_typed(const float* q, int queries, const NodeRows& nodes, float* z, std::int64_t stride) {
  const std::int64_t d = nodes.d, planes = nodes.planes();
  alignas(64) float squares[kMostNodeQueries * (kMaxHeadDim + 1) / 2];  // [queries, planes]
  for (int m = 0; m < queries && nodes.spreads; ++m) {
    const float* const own = q + m * d;
    for (std::int64_t j = 0; j < planes; ++j)
      squares[m * planes + j] = own[j] * own[j] + (j + planes < d ? own[j + planes] * own[j + planes] : 0.0f);
  }
  for (std::int64_t begin = 0; begin < nodes.count; begin += kNodeBlock) {
    const std::int64_t end = begin + kNodeBlock < nodes.count ? begin + kNodeBlock : nodes.count;
    int m = 0;
    const auto chunk = [&]<int M>() {
      for (; m + M <= queries; m += M)
        score_queries<T, M>(q + m * d, squares + m * planes, nodes, begin, end, z + m * stride, stride);
    };
    chunk.template operator()<4>();
    chunk.template operator()<2>();
    chunk.template operator()<1>();
  }
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
  }
}

}  // namespace
}  // namespace lode
