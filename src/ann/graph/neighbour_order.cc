// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/neighbour_order.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ann/partition.h"
#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Points of one chain: more cost their square, and are cut into several.
constexpr std::size_t kLongestChain = 512;

/// Sixteen sums at a time, which are no chain.
double squared_distance(std::span<const float> a, std::span<const float> b) {
  constexpr std::size_t kSums = 16;
  float sums[kSums] = {};
  const std::size_t whole = a.size() / kSums * kSums;
  for (std::size_t i = 0; i < whole; i += kSums)
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += (a[i + j] - b[i + j]) * (a[i + j] - b[i + j]);
  for (std::size_t i = whole; i < a.size(); ++i) sums[i - whole] += (a[i] - b[i]) * (a[i] - b[i]);
  return std::accumulate(sums, sums + kSums, 0.0f);
}

/// Puts points in the order of a walk that begins at the one nearest `from` and goes on to the nearest that
/// is left, ties to the first.
void chain(Matrix<const float> x, std::span<const float> from, std::span<std::int32_t> points) {
  for (std::size_t next = 0; next < points.size(); ++next) {
    std::size_t nearest = next;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = next; i < points.size(); ++i) {
      if (const double distance = squared_distance(x[points[i]], from); distance < least)
        least = distance, nearest = i;
    }
    std::swap(points[next], points[nearest]);
    from = x[points[next]];
  }
}

}  // namespace

std::vector<std::int32_t> neighbour_order(Matrix<const float> x, Nearness nearness, std::uint64_t seed,
                                          ThreadPool& pool) {
  LODE_ASSERT(x.stride == x.cols && x.rows >= 1);
  const auto wanted = static_cast<std::int64_t>(std::sqrt(static_cast<double>(x.rows)));
  return neighbour_order(x, partition_points(x, wanted, nearness, seed, pool));
}

std::vector<std::int32_t> neighbour_order(Matrix<const float> x, const Partition& cells) {
  LODE_ASSERT(x.stride == x.cols && std::ssize(cells.labels) == x.rows);
  const std::int64_t count = cells.clusters;
  std::vector<std::vector<std::int32_t>> members(static_cast<std::size_t>(count));
  std::vector<float> centres(static_cast<std::size_t>(count * x.cols));  // [count, d]
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const std::int32_t cell = cells.labels[static_cast<std::size_t>(i)];
    members[static_cast<std::size_t>(cell)].push_back(static_cast<std::int32_t>(i));
    for (std::int64_t j = 0; j < x.cols; ++j)
      centres[static_cast<std::size_t>(cell * x.cols + j)] += x[i][static_cast<std::size_t>(j)];
  }
  for (std::int64_t c = 0; c < count; ++c) {
    for (std::int64_t j = 0; j < x.cols; ++j)
      centres[static_cast<std::size_t>(c * x.cols + j)] /=
          static_cast<float>(members[static_cast<std::size_t>(c)].size());
  }
  const Matrix<const float> centre = {centres.data(), count, x.cols};
  std::vector<std::int32_t> walk(static_cast<std::size_t>(count));
  std::iota(walk.begin(), walk.end(), 0);
  chain(centre, centre[0], walk);
  std::vector<std::int32_t> order;
  for (const std::int32_t cell : walk) {
    std::vector<std::int32_t>& own = members[static_cast<std::size_t>(cell)];
    for (std::size_t at = 0; at < own.size(); at += kLongestChain)
      chain(x, order.empty() ? centre[cell] : x[order.back()],
            std::span(own).subspan(at, std::min(kLongestChain, own.size() - at)));
    order.insert(order.end(), own.begin(), own.end());
  }
  return order;
}

}  // namespace lode
