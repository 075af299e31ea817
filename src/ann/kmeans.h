// SPDX-License-Identifier: Apache-2.0
// Spherical and Euclidean k-means on plain matrices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// What is near. Points that are compared by distance are lifted by a last coordinate 1, and their centroids
/// by -|c|^2 / 2: then the nearest centroid is the one of largest inner product, as it is for cosines.
enum class Nearness { cosine, distance };

struct KMeansOptions {
  std::int64_t clusters = 0;  ///< C, at most the number of points
  int iterations = 10;        ///< fewer when no label changes any more
  std::uint64_t seed = 0;     ///< of the initial points and of what empty clusters are replaced by
  Nearness nearness = Nearness::cosine;
};

/// Centroids [C, d] of norm 1 (or 0, of a cluster whose points sum to 0) that locally maximise sum_i max_c
/// x_i . c; with Nearness::distance lifted ones that minimise the sum of squared distances. Points must be
/// finite. The same for any number of threads. Polls check_cancel.
std::vector<float> spherical_kmeans(Matrix<const float> x /*[n, d], dense*/, const KMeansOptions& options,
                                    ThreadPool& pool);

/// The two steps of an iteration that read all points, so that a device can take them.
class LloydSteps {
 public:
  virtual ~LloydSteps() = default;
  /// labels[i] = argmax_c x_i . c, the lowest c of equal ones.
  virtual void assign(std::span<const float> centroids /*[C, d]*/,
                      std::span<std::int32_t> labels /*[n]*/) = 0;
  /// centroid c from the sum of the points order[offsets[c] .. offsets[c + 1]), see centre; one without
  /// points stays.
  virtual void update(std::span<const std::int64_t> order /*[n]*/,
                      std::span<const std::int64_t> offsets /*[C + 1]*/,
                      std::span<float> centroids /*[C, d]*/) = 0;
};
std::vector<float> spherical_kmeans(Matrix<const float> x /*[n, d], dense*/, const KMeansOptions& options,
                                    LloydSteps& steps);

/// Makes the sum of a cluster's points its centroid: norm 1 (or 0), or the mean, lifted. False, and not to be
/// used, when that is not finite.
bool centre(std::span<float> sum, Nearness nearness);

/// labels[i] = argmax_c x_i . c, the lowest c of equal ones.
void assign_points(Matrix<const float> x /*[n, d], dense*/, std::span<const float> centroids /*[C, d]*/,
                   std::span<std::int32_t> labels, ThreadPool& pool);

}  // namespace lode
