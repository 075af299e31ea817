// SPDX-License-Identifier: Apache-2.0
// Clusters of a context's layers on the GPU while thresholds are searched for (select/device_keys.h): their scores for
// many queries, how these are distributed, and lists of the keys that are kept.
#pragma once

#include <map>
#include <vector>

#include "kernels/cuda/attend/attend.h"
#include "select/device_keys.h"

namespace lode {

class ClusterScorer {
 public:
  static constexpr std::int64_t kMostListed = 8;  ///< tokens of list()
  /// Bytes of device memory that `layer`'s clusters take, and what calls for so many tokens of `group` query heads a KV
  /// head take beside all layers'.
  static std::int64_t bytes_of(const ScoredClusters& clusters);
  static std::int64_t scratch_bytes(const ScoredClusters& clusters, int head_dim, std::int64_t tokens,
                                    int group);

  void hold(int layer, const ScoredClusters& clusters, int head_dim, cuda::StreamHandle stream);
  /// Adds to the bins. Waits for the stream.
  void count(const ScoringQueries& queries, int query_heads, const ScoreBins& bins,
             const cuda::Stream& stream);

  /// What a unit keeps of a layer, all KV heads: for list().
  void choose(const ScoringQueries& queries, int query_heads, double threshold, cuda::StreamHandle stream);
  /// Keys that the units keep, [units, Hkv]. Waits for the stream.
  void kept(std::span<std::int32_t> to, const cuda::Stream& stream) const;
  /// Lists of tokens [token, token + tokens) of the last choose(), [tokens, Hkv, capacity] and their counts; sink and
  /// window are the caller's to say.
  cuda::RowLists list(std::int64_t token, std::int64_t tokens, cuda::StreamHandle stream);

  void release();
  std::int64_t bytes() const;  ///< of device memory held

 private:
  /// As ScoredClusters::Head has them; what is not there is null.
  struct Head {
    const void *centroids = nullptr, *spreads = nullptr;
    const float *scales = nullptr, *spread_scales = nullptr;
    const std::int32_t *first = nullptr, *rows = nullptr;
    std::int64_t nodes = 0, keys = 0;
  };
  struct Layer {
    DType type = DType::q8;
    cuda::Buffer memory;
    std::vector<Head> heads;
  };
  /// Average scores of all units for one head's nodes, in scores_.
  void score(const Layer& layer, std::size_t head, const ScoringQueries& queries, int query_heads,
             cuda::StreamHandle stream);
  std::int64_t units(const ScoringQueries& queries, int query_heads) const;

  int head_dim_ = 0;
  std::map<int, Layer> layers_;
  std::vector<float> by_head_;           // [tokens, group, d] of one head, scaled
  cuda::Buffer queries_, squares_;       // [rows, d], [rows, planes]
  cuda::Buffer nodes_, weights_, more_;  // [C, d] in float32; [rows, C]; the same of spreads
  cuda::Buffer scores_, bins_;           // [units, C], [bins]
  // Of the last choose():
  const Layer* chosen_ = nullptr;
  std::int64_t together_ = 1, units_ = 0;
  cuda::Buffer places_, counts_;      // [Hkv][units, C], [Hkv][units]
  cuda::Buffer lists_, list_counts_;  // [tokens, Hkv, capacity], [tokens, Hkv]
};

}  // namespace lode
