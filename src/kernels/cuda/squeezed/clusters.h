// SPDX-License-Identifier: Apache-2.0
// The choice of clusters by one threshold on the GPU, and the keys in them, in one launch (Squeezed
// Attention, equation 1): scores of all centroids, their log-sum-exp, the comparison, the lists. Needs
// clusters of blocks (sm_90).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// What is stored of a centroid: halves; whole numbers of 8 bits with a scale a node; and beside these,
/// likewise, the variance of its keys in each plane of dimensions i and i + (d + 1) / 2.
enum class CentroidKind : std::uint8_t { f16, q8, q8_spreads };

/// Clusters of one layer, as parts of an index one after the other; device memory.
struct ClusterTables {
  CentroidKind kind = CentroidKind::f16;
  const std::byte* centroids = nullptr;  // [Hkv, centroid_bytes(most_nodes, d, kind)]
  const float* scales = nullptr;         // [Hkv] by which the stored numbers are multiplied
  const std::int32_t* first = nullptr;   // [Hkv, most_nodes + 1] of a node's keys in rows
  const std::int32_t* rows = nullptr;    // [Hkv, most_keys]
  const std::int32_t* nodes = nullptr;   // [Hkv, most_parts + 1] of the first so many parts
  std::int64_t most_keys = 0;
  int most_nodes = 0, most_parts = 0;
};

/// Centroids lie as the matrix unit takes them: tiles of 16 nodes in pieces of 32 dimensions. Of halves [2 x
/// 8 nodes][4 x 8 dimensions]; of bytes [8 nodes][4 x 8 dimensions][nodes i, i + 8], then the pieces of
/// spreads, the scales and the roots of the spreads' scales. What is missing is 0.
std::int64_t centroid_bytes(std::int64_t nodes, int head_dim, CentroidKind kind);
void pack_centroids(std::span<const std::uint16_t> halves /*[nodes, d]*/, int head_dim,
                    std::int64_t first_node, std::byte* to);
struct ByteCentroids {
  std::span<const std::byte> centroids;  // [nodes, d]
  std::span<const float> scales;         // [nodes]
  std::span<const std::byte> spreads;    // [nodes, (d + 1) / 2], 0 to 127; or nothing
  std::span<const float> spread_scales;  // [nodes]
};
void pack_centroids(const ByteCentroids& nodes, int head_dim, std::int64_t first_node, std::byte* to);

/// What changes from step to step. Device memory.
struct ClusterStep {
  double threshold = 0.0;           ///< in units of the uniform weight; 0 keeps everything
  std::int32_t parts = 0;           ///< that count
  std::int32_t begin = 0, end = 0;  ///< keys [begin, end) are in these
  std::int32_t spreads = 1;         ///< whether scores add those that the tables have
};

struct ClusterChoiceTask {
  ClusterTables tables;
  const ClusterStep* step = nullptr;
  int stretch = 1;       ///< query tokens that choose together, from the first on
  bool squares = false;  ///< the root of the mean square, not the mean
  /// Tokens of a stretch that get lists, its first ones.
  int listed = 1 << 30;
  std::int64_t window = 0;
  std::int32_t* rows = nullptr;    // [N, Hkv, capacity] by cluster
  std::int32_t* counts = nullptr;  // [N, Hkv]
  std::int64_t capacity = 0;
};

/// Whether the blocks of a task have room for the scores of so many nodes.
bool fits_cluster_choice(std::int64_t most_nodes, int head_dim, int kv_heads);

/// For every query token and KV head: the keys of clusters with
///   mean (or root of the mean square) over the stretch's tokens and the group's heads of  K exp(scale q.C) /
///   sum_j N_j exp(scale q.C_j)
/// above the threshold, N_j keys in cluster j and K in all, then every key from step.end to the window. With
/// spreads, where the step says so, q.C has added to it what select/squeezed/squeezed.cc adds (logits).
/// Queries with a number that is not finite have no say. Deterministic.
void choose_clusters(const ClusterChoiceTask& task, const Queries& queries, StreamHandle stream);

}  // namespace lode::cuda
