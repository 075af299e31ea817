// SPDX-License-Identifier: Apache-2.0
// Clusters of clusters of one head's keys (Squeezed Attention, section 3.1 and figure 2): keys are clustered
// by cosine or in a metric, centroids are clustered again, and each node keeps the mean of the raw keys below
// it.
//
// Flat arrays, so that a level is one matrix and the children of a node are one range of rows: what a device
// reads is what is stored.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/kv_view.h"
#include "select/shared/calibration.h"

namespace lode {

struct KeyClusters;
class SectionReader;
class SectionWriter;
class ThreadPool;

/// Nodes of one level. Children of node i are nodes [first[i], first[i + 1]) of the next finer level, or at
/// the finest level the keys rows[first[i]], ..., rows[first[i + 1] - 1].
struct ClusterLevel {
  std::vector<std::int32_t> first;   // [nodes + 1]
  std::vector<std::int32_t> keys;    // [nodes] keys below each, at least 1
  std::vector<std::byte> centroids;  // [nodes, d] of the tree's type
  std::vector<float> scales;         // [nodes] of centroids in 8 bits, else empty
  std::vector<std::byte> values;     // [nodes, d] means of the values, when asked for
  /// Variance of the keys below each, when asked for: whole numbers of 8 bits times a scale. One for each
  /// plane that RoPE turns, dimensions i and i + spread_dims(d): turned by many positions, both vary alike.
  std::vector<std::byte> spreads;    // [nodes, spread_dims(d)] q8, none below 0
  std::vector<float> spread_scales;  // [nodes]
  std::int32_t nodes() const { return static_cast<std::int32_t>(keys.size()); }
};

/// Numbers of a node's spread; an odd dimension is without its partner.
constexpr std::int64_t spread_dims(std::int64_t d) {
  return (d + 1) / 2;
}

struct ClusterTree {
  DType type = DType::f16;           ///< of centroids: q8, or as means of values
  DType values_type = DType::f16;    ///< f16, f32 where a mean does not fit
  std::vector<ClusterLevel> levels;  ///< coarsest first
  std::vector<Position> rows;        // [keys] leaf by leaf, rising inside a leaf
  std::int64_t bytes() const;
};

struct ClusterTreeOptions {
  std::vector<std::int64_t>
      nodes;  ///< wanted per level, coarsest first; fewer where there are fewer children
  bool values = false, spreads = false;
  bool q8 = false;  ///< centroids in 8 bits
  std::uint64_t seed = 0;
  /// L [d, d] row by row: keys are clustered by the distance of k L (query_metric.h). Empty: by cosine.
  std::span<const float> metric;
  /// Of the keys, where a GPU has made them in that way, `in_order`; null: they are made here.
  const KeyClusters* clusters = nullptr;
};

/// Clusters without empty ones, by rising number of their first key.
KeyClusters in_order(const KeyClusters& found, std::int64_t d);

/// Clusters keys [begin, end) of a head, at least one. The same for any number of threads.
ClusterTree build_cluster_tree(const KvRows& kv, Position begin, Position end,
                               const ClusterTreeOptions& options, ThreadPool& pool);

/// Centroids in 8 bits: whole numbers times a scale for each node. No effect on a tree that has them.
void centroids_to_q8(ClusterTree& tree, std::int64_t d);

/// The trees of all heads over keys [begin, end).
struct ClusterSegment {
  Position begin = 0, end = 0;
  std::vector<ClusterTree> heads;  // [Hkv]
};

/// Whose scores add what keys differ by inside of a cluster: those of query tokens that choose together, or
/// of single ones. Nodes have spreads unless it is none.
enum class Spreads : std::uint8_t { none = 0, together = 1, alone = 2, all = 3 };
inline bool adds(Spreads spreads, QueryKind kind) {
  return (static_cast<int>(spreads) >> static_cast<int>(kind) & 1) != 0;
}

/// What every tree of an index has in common.
struct ClusterShape {
  int heads = 0, head_dim = 0, levels = 1;
  Position begin = 0;  ///< first key of the first segment
  bool values = false;
  Spreads spreads = Spreads::none;
  bool q8 = false;  ///< centroids in 8 bits
};

void save_segments(std::span<const ClusterSegment> segments, const ClusterShape& shape, SectionWriter& out);
/// Of what save_segments wrote; none of what it did not.
Spreads saved_spreads(const SectionReader& in);
/// What save_segments wrote, or would have with centroids in 16 bits; InputError unless it fits the shape and
/// a text of `tokens` tokens, every key is in one leaf, and every node is the child of one.
std::vector<ClusterSegment> load_segments(const ClusterShape& shape, std::int64_t tokens,
                                          const SectionReader& in);

}  // namespace lode
