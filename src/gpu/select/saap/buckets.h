// SPDX-License-Identifier: Apache-2.0
// Methods that keep every key in one bucket and attend whole buckets (kmeans, saap), on the GPU: networks,
// labels and lists of all layers are there; one launch chooses buckets, and attention reads their lists where
// they lie.
#pragma once

#include <functional>
#include <optional>

#include "gpu/select/saap/bucket_labels.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/saap/buckets.h"
#include "kernels/cuda/saap/probe.h"
#include "select/shared/bucket_choice.h"

namespace lode {

class GpuBuckets final : public GpuSelector {
 public:
  /// Networks of a layer, asked for when the keys of the context are there; nothing: not yet, so everything
  /// is attended.
  using Source =
      std::function<std::optional<BucketChoice>(int layer, const GpuKeys& keys, cuda::StreamHandle stream)>;

  /// Told the sizes of a layer's buckets, all keys counted, when the context has been indexed.
  using Listener = std::function<void(int layer, std::span<const std::int64_t> sizes /*[Hkv, C]*/)>;

  /// What the host knows of a layer's buckets: null, or keys whose labels are taken over.
  using Known = std::function<const BucketIndex*(int layer)>;

  /// `layers` says which have selectors at all. With `known` the source reads what the host has built.
  GpuBuckets(const Spec& spec, const GpuGeometry& geometry, std::vector<bool> layers, Source source,
             Listener listener, Known known = nullptr);

  bool needs_host_index() const override { return known_ != nullptr; }
  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override;
  void roll_back(int sequence, std::int64_t tokens) override;
  std::int64_t most_tokens(std::int64_t position, Phase phase) const override;
  void begin(const GpuStep&) override {}
  void upload(cuda::StreamHandle) override {}
  bool has_news() const override { return false; }
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override;
  bool attend(int layer, const cuda::Queries& queries, const float* q_unrotated, void* workspace,
              cuda::StreamHandle stream) override;
  std::int64_t counts_per_layer() const override {
    return std::int64_t{geometry_.most_queries} * geometry_.kv_heads;
  }
  int lists_per_head() const override { return 1; }
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads,
                            std::int64_t chosen) const override;
  std::int64_t bytes() const override;

  /// Whether the kernel can take these networks for a group of so many query heads.
  static bool supports(const BucketChoice& choice, int group);

 private:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  /// How far one sequence's index has come.
  struct State {
    std::int64_t labelled = 0;  ///< keys [sink, labelled) have labels
    std::int64_t listed = 0;    ///< keys [sink, listed) are in lists
    bool stale = true;          ///< lists hold keys that are no more, or there are none
  };

  void take_networks(const GpuKeys& keys, cuda::StreamHandle stream);
  void take_network(int layer, const BucketChoice& choice, cuda::StreamHandle stream);
  void allocate(const BucketChoice& choice);
  /// Where lists end when `position` is asked for: in whole blocks, so that it depends on the position alone.
  std::int64_t end_of_lists(std::int64_t position) const;
  void list(const GpuKeys& keys, int layer, std::int64_t end, cuda::StreamHandle stream);
  void label(const GpuKeys& keys, int layer, std::int64_t begin, std::int64_t end, cuda::StreamHandle stream);
  std::int64_t take_labels(const GpuKeys& keys, int layer, std::int64_t begin, std::int64_t end,
                           cuda::StreamHandle stream);
  void report_sizes(int layer, std::int64_t place, cuda::StreamHandle stream) const;
  cuda::BucketTables tables(int layer) const;
  /// Chooses: the stretches of lists that hold the far keys of the layer's queries.
  cuda::RowRuns choose(int layer, const cuda::Queries& queries, const float* q_unrotated,
                       cuda::StreamHandle stream);
  /// Networks of a layer.
  std::int64_t nets_of_layer() const { return std::int64_t{stretches_.networks} * geometry_.kv_heads; }
  std::int64_t lists_of_layer() const { return std::int64_t{geometry_.sequences} * geometry_.kv_heads; }

  Spec spec_;
  GpuGeometry geometry_;
  std::vector<bool> layers_;
  Source source_;
  Listener listener_;  ///< or null
  Known known_;        ///< or null
  std::int64_t known_end_ =
      0;  ///< keys from here on may have been cut and written anew since the host built its index
  bool ready_ = false;    ///< the source has given its networks
  bool changed_ = false;  ///< networks that no prepare has told of yet
  cuda::NetLayout net_;
  cuda::NetStretches stretches_;
  std::int64_t probes_ = 0;
  bool roped_ = false, softmax_ = true;
  cuda::BucketRank rank_ = cuda::BucketRank::mass;
  BucketLabels labeller_;
  std::vector<State> states_;   // [sequences]
  cuda::Buffer nets_;           // [L, K, Hkv, net_.bytes()]
  cuda::Buffer centroids_;      // [L, Hkv, C, d]
  cuda::Buffer labels_;         // [L, sequences, Hkv, max_tokens] uint16
  cuda::Buffer offsets_;        // [L, sequences, Hkv, C + 1]
  cuda::Buffer listed_rows_;    // [L, sequences, Hkv, max_tokens]
  cuda::Buffer listed_;         // [sequences]
  cuda::Buffer workspace_;      // of lists
  cuda::Buffer runs_;           // [most_queries, Hkv, runs]
  cuda::Buffer more_;           // [most_queries, Hkv, shares, share] chosen keys that are not in lists yet
  cuda::Buffer rows_, counts_;  // [most_queries, Hkv, max_tokens], [L, most_queries, Hkv]
};

/// Centroids of keys [sink, tokens) of one layer and KV head, or of an even sample of them, by spherical
/// k-means on the GPU (ann/kmeans.h has the procedure).
std::vector<float> train_centroids_on_gpu(const GpuKeys& keys, int layer, int kv_head, std::int64_t sink,
                                          bool roped, std::int64_t clusters, cuda::StreamHandle stream);

}  // namespace lode
