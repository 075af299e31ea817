// SPDX-License-Identifier: Apache-2.0
// Spherical k-means on plain matrices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

class ThreadPool;

struct KMeansOptions {
  std::int64_t clusters = 0;  ///< C, at most the number of points
  int iterations = 10;        ///< fewer when no label changes any more
  std::uint64_t seed = 0;     ///< of the initial points and of what empty clusters are replaced by
};

/// Centroids [C, d] of norm 1 (or 0, of a cluster whose points sum to 0) that locally maximise sum_i max_c
/// x_i . c. Points must be finite. The same for any number of threads. Polls check_cancel.
std::vector<float> spherical_kmeans(Matrix<const float> x /*[n, d], dense*/, const KMeansOptions& options,
                                    ThreadPool& pool);

/// labels[i] = argmax_c x_i . c, the lowest c of equal ones.
void assign_points(Matrix<const float> x /*[n, d], dense*/, std::span<const float> centroids /*[C, d]*/,
                   std::span<std::int32_t> labels, ThreadPool& pool);

}  // namespace lode
