// SPDX-License-Identifier: Apache-2.0
// Centroids that were trained offline: a safetensors file with one tensor "layer.L.head.H.centroids" [C, d]
// per layer and KV head, and the metadata "rope" (off: trained on keys before RoPE; on: after it) and
// "model_fingerprint".
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ann/kmeans.h"
#include "lodestone/selector.h"

namespace lode {

class KvStore;
class ThreadPool;

/// Keys that train one centroid, at most. On keys of the pocket model (16k tokens, 1,024 centroids) training
/// on 8 instead of 16 keys a centroid costs 0.0007 to 0.013 of a mean cosine of 0.83 to 0.99; Faiss takes
/// 256.
inline constexpr std::int64_t kTrainingKeysPerCentroid = 32;

/// Collects keys of many texts, then trains centroids for every layer and KV head.
class CentroidTrainer {
 public:
  /// `roped`: keys stay as they are stored; else they are un-rotated.
  CentroidTrainer(int layers, int kv_heads, int head_dim, bool roped, std::uint64_t seed);

  /// Takes `count` random keys of each head out of a text's, its first `sink` tokens left out; all of them
  /// when there are fewer.
  void add(const KvStore& kv, const Rope& rope, std::int64_t sink, std::int64_t count, ThreadPool& pool);
  std::int64_t keys() const;                              ///< per head, so far
  Matrix<const float> sample(int layer, int head) const;  ///< keys of one head, [keys, d]

  /// Who clusters the keys of one head.
  using Cluster = std::function<std::vector<float>(Matrix<const float> keys, const KMeansOptions& options)>;

  /// Centroids [L][Hkv][C, d]. InputError when fewer keys than clusters were added.
  std::vector<std::vector<std::vector<float>>> train(
      std::int64_t clusters, ThreadPool& pool,
      const std::function<void(std::int64_t heads_done)>& progress = {}) const;
  std::vector<std::vector<std::vector<float>>> train(
      std::int64_t clusters, const Cluster& cluster,
      const std::function<void(std::int64_t heads_done)>& progress = {}) const;

 private:
  int kv_heads_, head_dim_;
  bool roped_;
  std::uint64_t seed_;
  int texts_ = 0;
  std::vector<std::vector<std::vector<float>>> keys_;  // [L][Hkv][keys, d]
};

/// Centroids [Hkv][C, d] of the geometry's layer, scaled to norm 1. InputError when a tensor is missing, has
/// another shape or type or a number that is not finite, when heads have different C, or when the file was
/// made for another model or RoPE.
std::vector<std::vector<float>> read_centroids(const std::filesystem::path& path,
                                               const LayerGeometry& geometry, bool roped,
                                               std::string_view model_fingerprint);

/// Writes the centroids of all layers: layers[l][h] is [C, d].
void write_centroids(const std::filesystem::path& path,
                     const std::vector<std::vector<std::vector<float>>>& layers, int head_dim, bool roped,
                     std::string_view model_fingerprint);

}  // namespace lode
