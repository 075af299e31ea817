// SPDX-License-Identifier: Apache-2.0
// What a GPU that holds a context's keys computes of them while an index is built, in place of the host's cores:
// clusters of keys, how queries of the context attend them, which keys are nearest to queries, links of graphs of keys
// and walks over them. Every call gives the same bits each time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ann/graph/graph_device.h"
#include "lodestone/selector.h"
#include "lodestone/types.h"

namespace lode {

/// Keys [begin, end) of some of a layer's KV heads. One with a number that is not finite counts as 0.
struct KeysOnDevice {
  int layer = 0;
  std::vector<int> heads;  ///< by their numbers in the layer
  Position begin = 0, end = 0;
  const Rope* unrotate_by = nullptr;  ///< for what is made of keys before RoPE; null: as they are stored
  std::int64_t count() const { return std::int64_t{end} - begin; }
};

inline std::vector<int> heads_in_layer(const LayerGeometry& geometry) {
  std::vector<int> heads;
  for (int head = 0; head < geometry.kv_heads; ++head) heads.push_back(geometry.kv_head_in_layer(head));
  return heads;
}

/// Clusters of one head's keys, some of which may be empty.
struct KeyClusters {
  std::vector<std::int32_t> labels;  // [keys]
  std::vector<std::int32_t> keys;    // [C] how many are in each
  std::vector<float> means;          // [C, d] of the keys
  std::vector<float> spreads;        // [C, d] their variances
  std::vector<float> places;         // [C, d] means as they were compared: see ClusterTask::metrics
  std::vector<std::int32_t> cells;   // [C] which of about sqrt(C) groups of near clusters each is in
};

struct ClusterTask {
  std::int64_t clusters = 0;             ///< wanted, at most the number of keys
  std::span<const std::uint64_t> seeds;  // [heads]
  /// L [d, d] for each head: keys are compared by the distance of (k - mean k) L. Empty: by the direction of k.
  std::span<const std::vector<float>> metrics;
};

/// A layer's clusters of one level, as lookups score them (select/shared/threshold_selector.h): with what spreads add,
/// where there are any, of kernels/select/centroid_scores.h.
struct ScoredClusters {
  struct Head {
    std::vector<std::byte> centroids;  // [C, d] of `type`
    std::vector<float> scales;         // [C] of centroids in 8 bits, else empty
    std::vector<std::byte> spreads;    // [C, ceil(d / 2)] in 8 bits, or empty
    std::vector<float> spread_scales;  // [C], or empty
    std::vector<std::int32_t> first;   // [C + 1] of each one's keys in rows
    std::vector<Position> rows;        // [keys]
    std::int64_t count() const { return std::ssize(first) - 1; }
  };
  DType type = DType::q8;
  std::vector<Head> heads;  // [Hkv]
};

/// Queries of a layer that stand behind the context, and how their scores of clusters are averaged.
struct ScoringQueries {
  int layer = 0;
  std::span<const float> q;   ///< [tokens, Hq, d]
  std::int64_t together = 1;  ///< tokens of a unit; the last one may have fewer
  float scale = 1.0f;
  bool squares = false;  ///< the root of the mean square, not the mean
  bool spreads = false;  ///< whether scores add them
};

/// Keys by their clusters' average scores: of score x > 0 in the bin (log x - lowest) per_unit, cut to those that there
/// are.
struct ScoreBins {
  double lowest = 0, per_unit = 1;
  std::span<std::uint64_t> keys;  // [bins]
};

/// Attention of each token to sink, window and what its unit keeps: clusters above the threshold, all of them at 0.
struct ChosenAttention {
  double threshold = 0;
  std::int64_t sink = 0, window = 0;
  std::span<float> outputs, lse;  // [tokens, Hq, d], [tokens, Hq]
  std::span<std::int32_t> kept;   // [units, Hkv] keys, without sink and window
};

class DeviceKeys {
 public:
  virtual ~DeviceKeys() = default;

  /// Of fewer keys the host's cores make clusters in milliseconds.
  static constexpr std::int64_t kFewest = 4096;
  /// Whether these keys are there, are worth the way, and so many clusters of them fit beside them: a method
  /// then leaves the clustering to the device, else to the host's cores.
  virtual bool takes(const KeysOnDevice& keys, std::int64_t clusters) const = 0;

  /// Spherical k-means (ann/kmeans.h) of a sample of each head's keys: [heads][C, d].
  virtual std::vector<std::vector<float>> centroids(const KeysOnDevice& keys,
                                                    std::span<const std::vector<Position>> samples,
                                                    std::int64_t clusters,
                                                    std::span<const std::uint64_t> seeds) = 0;
  /// The nearest centroid by inner product of every key, [heads, keys].
  virtual std::vector<std::int32_t> labels(
      const KeysOnDevice& keys, std::span<const std::vector<float>> centroids /*[heads][C, d]*/) = 0;

  virtual std::vector<KeyClusters> clusters(const KeysOnDevice& keys, const ClusterTask& task) = 0;
  /// The root of sum p^2 of each query's softmax p over the keys of its KV head; 0 for one that is not a number.
  /// Queries stand as they do in a QueryBlock of the keys' heads: [tokens, heads, group, d] and [tokens, heads,
  /// group].
  virtual std::vector<double> sharpness(const KeysOnDevice& keys, std::span<const float> queries, int group,
                                        float scale) = 0;
  /// Attention of queries to all of the context's keys: outputs [tokens, Hq, d], lse [tokens, Hq].
  virtual void attend(int layer, std::int64_t tokens, std::span<const float> queries /*[tokens, Hq, d]*/,
                      float scale, std::span<float> outputs, std::span<float> lse) = 0;

  static constexpr std::int64_t kMostNearest = 128;
  /// Whether nearest_keys takes so many rows of `width` numbers, and there is room for them.
  virtual bool takes_nearest(std::int64_t /*queries*/, std::int64_t /*keys*/, std::int64_t /*width*/,
                             std::int64_t /*k*/) const {
    return false;
  }
  /// As ann/nearest.h, of rows in host memory; products of rows with 11 bits a number. -1 in front of a list that is
  /// not known: of keys that are nearly all alike. Several threads may call at once: they take turns.
  virtual std::vector<std::int32_t> nearest_keys(Matrix<const float> /*queries*/,
                                                 Matrix<const float> /*keys*/, std::int64_t /*k*/) {
    return {};
  }

  /// As GraphDevice has them; null also where there is no room. Several threads may call at once.
  virtual std::unique_ptr<GraphLinker> linker(Matrix<const float> /*keys*/, std::span<const Node> /*nearest*/,
                                              std::int64_t /*each*/, int /*degree*/) {
    return nullptr;
  }
  virtual std::unique_ptr<QueryWalks> walks(const Wanted& /*of*/, const BeamKeys& /*keys*/,
                                            const KeyGraph& /*like*/) {
    return nullptr;
  }

  /// Copies a layer's clusters to the device, where calls for the layer find them until forget_clusters. False where
  /// there is no room for them or lookups in them.
  virtual bool hold_clusters(int /*layer*/, const ScoredClusters&, std::int64_t /*most_tokens*/) {
    return false;
  }
  virtual void forget_clusters() {}
  /// Adds the keys of each unit's and KV head's clusters to the bins of their scores.
  virtual void count_scores(const ScoringQueries&, const ScoreBins&) {}
  virtual void attend_chosen(const ScoringQueries&, const ChosenAttention&) {}

  /// Gives back what the calls have held of the device's memory.
  virtual void release() = 0;
  /// Of the device's memory that is held.
  virtual std::int64_t bytes() const { return 0; }
};

/// A selector whose index a GPU helps to build. A null device, or a call that is not for it (takes): the host's
/// cores do it all.
class BuiltByDevice {
 public:
  virtual ~BuiltByDevice() = default;
  /// `device` outlives the selector.
  virtual void build_by(DeviceKeys* device) { device_ = device; }
  /// Whether the host's cores have had to do what a device would have.
  virtual bool left_to_host() const { return left_to_host_; }

 protected:
  /// Whether there is a device for these keys.
  bool on_device(const KeysOnDevice& keys, std::int64_t clusters) const {
    const bool taken = device_ != nullptr && device_->takes(keys, clusters);
    left_to_host_ = left_to_host_ || (!taken && keys.count() >= DeviceKeys::kFewest);
    return taken;
  }
  DeviceKeys* device_ = nullptr;

 private:
  mutable bool left_to_host_ = false;
};

/// Queries of some tokens of a written chunk of a context.
struct SampledQueries {
  std::int32_t sequence = 0;
  Position begin = 0;                   ///< of the chunk
  std::int64_t tokens = 0;              ///< of the chunk
  std::span<const Position> positions;  ///< of those that are here
  std::span<const float> q;             // [positions, Hq, d]
};

/// body(first, count) for each run of positions that follow one another: places in `positions`.
template <class Body>
void for_runs(std::span<const Position> positions, const Body& body) {
  for (std::size_t first = 0, end = 0; first < positions.size(); first = end) {
    while (++end < positions.size() && positions[end] == positions[end - 1] + 1) {
    }
    body(static_cast<std::int64_t>(first), static_cast<std::int64_t>(end - first));
  }
}

/// Queries of a context that a selector keeps of what it heard, as a reading that was ended wants them to go on.
struct KeptQueries {
  std::int64_t stride = 1;  ///< how coarse they are, a power of two; what came before becomes as coarse
  std::vector<Position> positions;  ///< rising
  std::vector<std::byte> rows;      // [positions] rows of bytes, as the selector has them

  static constexpr std::int64_t kMostStride = std::int64_t{1} << 31;
  /// Rows of a sample of at most `most`, each written when it comes, though every second one goes whenever there are too
  /// many; a sixteenth more, since samples drawn by a hash lose not quite half.
  static constexpr std::int64_t rows_in_pieces(std::int64_t tokens, std::int64_t most) {
    std::int64_t rows = tokens < most ? tokens : most;
    for (std::int64_t reach = most; reach < tokens; reach *= 2) rows += most / 2 + most / 16;
    return rows;
  }
};

/// A selector whose on_write needs nothing but some of a chunk's queries: a GPU that writes the chunk hands over these
/// alone, and a reading that is ended keeps them.
class HearsQueries {
 public:
  virtual ~HearsQueries() = default;
  /// Whether it hears queries after RoPE, not before.
  virtual bool hears_rotated() const { return false; }
  /// Of which tokens of the next chunk on_queries must have them; rising.
  virtual std::vector<Position> wanted_queries(std::int32_t sequence, Position begin,
                                               std::int64_t tokens) const = 0;
  virtual void on_queries(const SampledQueries& queries) = 0;

  /// What is kept of tokens [begin, end), so that a reading can be ended there; nothing: it must be heard from its start.
  /// Of a chunk that was not read to its end more may have been heard.
  virtual std::vector<KeptQueries> kept_queries(std::int32_t /*sequence*/, Position /*begin*/,
                                                Position /*end*/) const {
    return {};
  }
  /// Bytes of it for so many tokens, at most, however often it is written.
  virtual std::int64_t kept_query_bytes(std::int64_t /*tokens*/) const { return 0; }
  /// Takes back what was kept, behind what has been taken back before; false where it does not fit.
  virtual bool take_back(std::int32_t /*sequence*/, std::span<const KeptQueries> /*kept*/) { return false; }
  /// Tokens of a text's end whose queries are not kept: these are read again.
  virtual std::int64_t unkept_end() const { return 0; }
  /// Whether queries of the text's end are enough, where nobody has those of its start.
  virtual bool learns_from_the_end() const { return false; }
};

}  // namespace lode
