// SPDX-License-Identifier: Apache-2.0
// Points cut into very many small clusters by cosine or distance, at a cost that does not grow with points
// times clusters.
#pragma once

#include <cstdint>
#include <vector>

#include "ann/kmeans.h"
#include "lodestone/types.h"

namespace lode {

struct Partition {
  std::int64_t clusters = 0;         ///< at most as many as asked for: none is empty
  std::vector<std::int32_t> labels;  // [n], in [0, clusters)
};

/// Clusters of points of norm 1 (or 0), or of lifted points. Up to kDirectClusters it is plain k-means; more
/// of them are found in two steps, about sqrt(C) cells first, then each cell's share of the clusters inside
/// it; then points move between clusters that are near each other. Without the moves, points at the borders
/// of cells sit in loose clusters, and rare keys, which a lookup must not lose, sit at borders. C = n / 20
/// costs n sqrt(n) for the steps and C squared for what is near, 400 times less than n squared. The same for
/// any number of threads. Polls check_cancel.
Partition partition_points(Matrix<const float> x /*[n, d], dense*/, std::int64_t clusters, Nearness nearness,
                           std::uint64_t seed, ThreadPool& pool);

/// Renumbers labels below `most` in the order in which they first occur, so that none is empty.
Partition compacted(std::vector<std::int32_t> labels, std::int64_t most);

inline constexpr std::int64_t kDirectClusters = 512;

}  // namespace lode
