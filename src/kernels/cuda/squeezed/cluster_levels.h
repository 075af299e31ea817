// SPDX-License-Identifier: Apache-2.0
// The choice of clusters of several levels, each by its threshold, on the GPU, and the keys in them, in one
// launch (Squeezed Attention, equations 2 and 3): children of nodes that are not kept are never read. Needs
// clusters of blocks (sm_90).
#pragma once

#include "kernels/cuda/squeezed/clusters.h"

namespace lode::cuda {

inline constexpr int kMostClusterLevels = 8;

/// Beside a node's centroid. Its children, or at the finest level its keys in the table of rows, end where
/// those of the next node begin.
struct alignas(16) ClusterNode {
  float scale = 1.0f;      ///< of a centroid in 8 bits
  float root = 0.0f;       ///< of the scale of its spread
  std::int32_t keys = 0;   ///< below it
  std::int32_t first = 0;  ///< child, or key
};

/// One level of all KV heads, parts of an index one after the other; device memory.
struct ClusterLevelTable {
  const std::byte* rows = nullptr;     // [Hkv, most_nodes, cluster_row_bytes]
  const ClusterNode* nodes = nullptr;  // [Hkv, most_nodes + 1]
  int most_nodes = 0;
};

struct ClusterLevelsTask {
  /// As for one level, but centroids and first are not read, nodes are those of the coarsest level, and
  /// `step` is an array [levels] that differs in thresholds only.
  ClusterChoiceTask choice;
  int levels = 0;  ///< 2 to kMostClusterLevels
  ClusterLevelTable level[kMostClusterLevels];
  std::int32_t* compared = nullptr;  // [N, Hkv] nodes of all levels; may be null
  int ranks = 0;                     ///< blocks that share a KV head: cluster_level_ranks
  int most_entries = 0;  ///< nodes of one level below the coarsest nodes i, i + ranks, ... of one i
};

/// A node's centroid and spread as the matrix unit takes them: in halves dimension by dimension; in bytes
/// pairs of pieces of 32 dimensions, [4][2 pieces][8 dimensions]. What is missing is 0.
std::int64_t cluster_row_bytes(int head_dim, CentroidKind kind);
void pack_cluster_rows(std::span<const std::uint16_t> halves /*[nodes, d]*/, int head_dim, std::byte* to);
/// Scales are left out: they are ClusterNode's.
void pack_cluster_rows(const ByteCentroids& nodes, int head_dim, std::byte* to);

/// Blocks that share a KV head, as many as this GPU places, the fewest first: the choice is to take the first
/// for which all nodes fit (fits_cluster_levels).
std::span<const int> cluster_level_ranks(int kv_heads);
bool fits_cluster_levels(std::int64_t most_entries, int head_dim);

/// As choose_clusters, level by level: a node is compared where its parent is kept, with the sum over those
/// that are compared. Rows of a list are in the order of the coarsest nodes i, i + ranks, ..., for i from 0
/// on.
void choose_clusters_of_levels(const ClusterLevelsTask& task, const Queries& queries, StreamHandle stream);

}  // namespace lode::cuda
