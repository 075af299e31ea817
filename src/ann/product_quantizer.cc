// SPDX-License-Identifier: Apache-2.0
#include "ann/product_quantizer.h"

#include <algorithm>

#include "base/cancel.h"
#include "base/rng.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr std::int64_t kPiece = 256;  // vectors that are extended at a time

}  // namespace

std::vector<float> lifted_centroids(std::span<const float> centroids, std::int64_t width) {
  const std::int64_t more = width + 1, levels = std::ssize(centroids) / width;
  std::vector<float> lifted(static_cast<std::size_t>(levels * more));
  for (std::int64_t c = 0; c < levels; ++c) {
    const float* const from = centroids.data() + c * width;
    std::copy_n(from, width, lifted.data() + c * more);
    lifted[static_cast<std::size_t>(c * more + width)] = -0.5f * kernels().dot(from, from, width);
  }
  return lifted;
}

void nearest_centroids(Matrix<const float> x, std::span<const float> centroids,
                       std::span<std::int32_t> labels) {
  const std::int64_t width = x.cols, more = width + 1, levels = std::ssize(centroids) / width;
  const std::vector<float> lifted = lifted_centroids(centroids, width);
  std::vector<float> piece(static_cast<std::size_t>(kPiece * more));
  for (std::int64_t first = 0; first < x.rows; first += kPiece) {
    const std::int64_t count = std::min(kPiece, x.rows - first);
    for (std::int64_t i = 0; i < count; ++i) {
      std::copy_n(x[first + i].data(), width, piece.data() + i * more);
      piece[static_cast<std::size_t>(i * more + width)] = 1.0f;
    }
    kernels().assign(piece.data(), count, lifted.data(), levels, static_cast<int>(more),
                     labels.data() + first, nullptr);
  }
}

std::vector<float> euclidean_kmeans(Matrix<const float> x, std::int64_t levels, int iterations,
                                    std::uint64_t seed) {
  const std::int64_t width = x.cols, n = x.rows;
  levels = std::min(levels, n);
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
  Rng rng(seed);
  std::vector<float> centroids;
  for (std::int64_t c = 0; c < levels; ++c) {
    const auto pick = c + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(n - c)));
    std::swap(order[static_cast<std::size_t>(c)], order[static_cast<std::size_t>(pick)]);
    const std::span<const float> start = x[order[static_cast<std::size_t>(c)]];
    centroids.insert(centroids.end(), start.begin(), start.end());
  }
  std::vector<std::int32_t> labels(static_cast<std::size_t>(n)), before;
  for (int round = 0; round < iterations; ++round) {
    check_cancel();
    nearest_centroids(x, centroids, labels);
    if (labels == before) break;
    before = labels;
    std::vector<double> sums(centroids.size(), 0.0);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(levels), 0);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t c = labels[static_cast<std::size_t>(i)];
      ++counts[static_cast<std::size_t>(c)];
      for (std::int64_t j = 0; j < width; ++j)
        sums[static_cast<std::size_t>(c * width + j)] += x[i][static_cast<std::size_t>(j)];
    }
    for (std::size_t j = 0; j < centroids.size(); ++j) {
      const std::int64_t count = counts[j / static_cast<std::size_t>(width)];
      if (count > 0) centroids[j] = static_cast<float>(sums[j] / static_cast<double>(count));
    }
  }
  return centroids;
}

void fill_product_tables(const ProductQuantizer& quantizer, std::span<const float> q, int entries,
                         std::span<float> tables) {
  std::fill(tables.begin(), tables.end(), 0.0f);
  for (int p = 0; p < quantizer.parts; ++p) {
    kernels().gemv(q.data() + std::int64_t{p} * quantizer.width, 1, quantizer.part(p), DType::f32,
                   quantizer.width, 0, quantizer.levels, tables.data() + std::int64_t{p} * entries,
                   quantizer.levels);
  }
}

}  // namespace lode
