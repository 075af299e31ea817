// SPDX-License-Identifier: Apache-2.0
// squeezed on the GPU: the clusters and thresholds that the host has found of the context, copied whenever
// they change; one launch a layer compares centroids and lists the keys, of one level
// (kernels/cuda/squeezed/clusters.h) or of several (kernels/cuda/squeezed/cluster_levels.h). Without a tail, over a context
// whose window does not slide: there nothing joins the index inside of steps. Everything else is chosen on
// the host.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/squeezed/cluster_levels.h"
#include "kernels/cuda/squeezed/clusters.h"
#include "select/squeezed/cluster_choice.h"

namespace lode {

class GpuClusters : public GpuSelector {
 public:
  /// Clusters of a layer; nothing while the host chooses.
  using Source = std::function<std::optional<ClusterChoice>(int layer)>;

  GpuClusters(const Spec& spec, const GpuGeometry& geometry, std::vector<bool> layers, Source source,
              bool host_index);

  bool needs_host_index() const override { return host_index_; }
  /// Trees of several levels that no block has room for are left to the host.
  bool chooses() const override;
  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override;
  std::int64_t most_tokens(std::int64_t, Phase phase) const override {
    if (phase != Phase::question) return geometry_.most_queries;
    if (stretch_of_questions_ == 0) return geometry_.most_tokens;
    // Whole stretches; a longer one is a step of its own.
    return std::max(stretch_of_questions_,
                    geometry_.most_queries / stretch_of_questions_ * stretch_of_questions_);
  }
  bool chooses_together() const override { return true; }
  std::int64_t most_together() const override { return geometry_.most_tokens; }
  void begin(const GpuStep& step) override;
  cuda::RowLists select_together(int layer, const cuda::Queries& all, cuda::StreamHandle stream) override;
  int counted_token(int t) const override { return stretch_ > geometry_.most_queries ? 0 : t; }
  void upload(cuda::StreamHandle stream) override {
    cuda::copy_numbers(step_.as<void>(), staged_, step_.bytes(), stream);
  }
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override;
  std::int64_t counts_per_layer() const override {
    return lists_per_layer() * (any_levels_ ? 2 : 1);  // and beside them nodes that were compared
  }
  int lists_per_head() const override { return 1; }
  /// Centroids with their numbers of keys, and the rows that are copied.
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads,
                            std::int64_t chosen) const override;
  std::int64_t bytes() const override {
    return centroids_.bytes() + scales_.bytes() + first_.bytes() + cluster_rows_.bytes() + nodes_.bytes() +
           rows_.bytes() + counts_.bytes() + block_.bytes() + level_bytes();
  }

 protected:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  int first_layer() const {
    return static_cast<int>(std::find(layers_.begin(), layers_.end(), true) - layers_.begin());
  }

  std::int64_t node_bytes() const;
  /// Whether tokens that choose together are looked up as a block, not a few at a time.
  bool looks_up_blocks() const;

  Spec spec_;
  GpuGeometry geometry_;
  std::vector<bool> layers_;
  Source source_;
  bool any_levels_ = false;                            ///< the spec may ask for several
  bool several_ = false;                               ///< levels, of the trees that are on the device
  cuda::Buffer step_;                                  // ClusterStep [kMostClusterLevels]
  cuda::CentroidKind kind_ = cuda::CentroidKind::f16;  ///< of all layers
  cuda::Buffer block_;  ///< cuda::BlockScratch of most_tokens, where looks_up_blocks()

 private:
  /// One of several levels, all layers.
  struct Level {
    cuda::Buffer rows;   // [L, Hkv, most_nodes, cluster_row_bytes]
    cuda::Buffer nodes;  // [L, Hkv, most_nodes + 1]
    std::int64_t most_nodes = 1;
  };

  /// Of all layers; nothing in those that are not in use.
  using Choices = std::vector<std::optional<ClusterChoice>>;

  /// Empty while the host chooses in a layer that is in use.
  Choices choices() const;
  /// Whether trees have several levels.
  bool has_several(const Choices& all) const;
  /// Whether blocks have room for the trees.
  bool fits(const Choices& all) const;
  std::int64_t lists_per_layer() const { return std::int64_t{geometry_.most_queries} * geometry_.kv_heads; }
  std::int64_t level_bytes() const;
  /// Blocks a KV head that the trees leave room for, and `entries` of the fullest; 0: too large.
  int ranks_for(const Choices& all, int& entries) const;
  void allocate_levels(const Choices& all);
  void take_levels(std::int64_t place, int head, const ClusterChoice& choice, float scale,
                   cuda::StreamHandle stream);
  void choose(int layer, const cuda::ClusterChoiceTask& task, const cuda::Queries& queries,
              cuda::StreamHandle stream) const;
  std::int64_t centroid_bytes() const {  // of a head
    return cuda::centroid_bytes(most_nodes_, geometry_.head_dim, kind_);
  }
  void allocate(const Choices& all);
  void take(int layer, const ClusterChoice& choice, cuda::StreamHandle stream);
  void take_head(std::int64_t place, int head, const ClusterChoice& choice, cuda::StreamHandle stream);
  cuda::ClusterTables tables(int layer) const;
  cuda::ClusterChoiceTask task(int layer) const;
  cuda::RowLists lists(int layer) const;

  bool host_index_ = false;
  std::int64_t stretch_of_questions_ = 0;        ///< 0: the whole question
  std::vector<std::int64_t> versions_;           // [L] of what is on the device
  mutable std::vector<std::int64_t> looked_at_;  // [L] versions that fits_ is of
  mutable bool fits_ = true;
  std::vector<Position> ends_;  // [parts]
  int stretch_ = 1;             ///< of the running step
  Position listed_end_ =
      0;                  ///< GpuStep::listed_end of the running step, where keys behind it are far; else 0
  bool squares_ = false;  ///< how the clusters that are on the device are chosen
  bool spreads_ = false;  ///< whether scores of the running step add them
  std::int64_t most_nodes_ = 0, most_keys_ = 0, nodes_of_layer_ = 0;
  cuda::Buffer centroids_;     // [L, Hkv, centroid_bytes()]
  cuda::Buffer scales_;        // [L, Hkv]
  cuda::Buffer first_;         // [L, Hkv, most_nodes + 1]
  cuda::Buffer cluster_rows_;  // [L, Hkv, most_keys]
  cuda::Buffer nodes_;         // [L, Hkv, parts + 1]
  cuda::Buffer rows_;          // [most_queries, Hkv, max_tokens]
  cuda::Buffer counts_;        // [L, most_queries, Hkv]
  cuda::PinnedBuffer staged_;  // ClusterStep [kMostClusterLevels]
  std::vector<Level> levels_;  // coarsest first, in place of centroids and first
  int ranks_ = 0, most_entries_ = 0;
};

}  // namespace lode
