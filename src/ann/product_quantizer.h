// SPDX-License-Identifier: Apache-2.0
// Product quantisation of vectors (Jegou et al. 2011): each of m parts of a vector is named by the nearest of
// 2^b centroids of that part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

struct ProductQuantizer {
  int parts = 0, width = 0;      ///< m, numbers of a part
  int levels = 0;                ///< centroids of a part, at most 256
  std::vector<float> centroids;  // [parts, levels, width]

  std::int64_t d() const { return std::int64_t{parts} * width; }
  const float* part(int which) const { return centroids.data() + std::int64_t{which} * levels * width; }
};

/// Centroids of one part by Lloyd's iterations from random vectors: fewer than `levels` where there are fewer
/// vectors, fewer iterations when nothing moves any more. A centroid that loses all vectors stays where it
/// is. Vectors must be finite; n > 0.
std::vector<float> euclidean_kmeans(Matrix<const float> x /*[n, width]*/, std::int64_t levels, int iterations,
                                    std::uint64_t seed);

/// [levels, width + 1]: behind each centroid c -|c|^2 / 2. The one nearest to x has the largest product with
/// x and 1 behind it.
std::vector<float> lifted_centroids(std::span<const float> centroids /*[levels, width]*/, std::int64_t width);

/// labels[i] := the centroid nearest to x_i, the lowest of equally near ones.
void nearest_centroids(Matrix<const float> x /*[n, width]*/,
                       std::span<const float> centroids /*[levels, width]*/, std::span<std::int32_t> labels);

/// table[p, c] := q's part p . centroid c of it, 0 for c from `levels` on.
void fill_product_tables(const ProductQuantizer& quantizer, std::span<const float> q /*[d]*/, int entries,
                         std::span<float> tables /*[parts, entries]*/);

}  // namespace lode
