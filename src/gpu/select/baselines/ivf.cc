// SPDX-License-Identifier: Apache-2.0
// ivf on the GPU: the centroids are the host's, keys are put into lists on the device from its own rows; a
// step chooses lists for each query head, scores the keys in them and takes the best.
#include "select/baselines/ivf.h"

#include "gpu/select/best_keys.h"
#include "gpu/select/key_index.h"
#include "gpu/select/saap/bucket_labels.h"
#include "gpu/select/saap/buckets.h"
#include "kernels/cuda/baselines/probed_keys.h"

namespace lode {

namespace {

class GpuIvf final : public GpuBestKeys {
 public:
  GpuIvf(const Spec& spec, const GpuGeometry& geometry, std::vector<const KeyLists*> files)
      : GpuBestKeys(spec, geometry, IvfOptions::of(spec).k, Ranked::query_head, 2),
        options_(IvfOptions::of(spec)),
        files_(std::move(files)),
        versions_(files_.size(), -1),
        labeller_(geometry.head_dim),
        labelled_(geometry.sequences) {
    labels_ = cuda::Buffer(geometry.sequences * sequence_labels() * 2, "the lists of keys");
  }

  bool chooses() const override {
    std::int64_t lists = -1;  // alike in all layers, unless some of them were never built
    return std::all_of(files_.begin(), files_.end(), [&](const KeyLists* file) {
      if (file == nullptr) return true;
      const BucketIndex* const index = file->key_lists().index;
      if (index == nullptr || index->buckets() > cuda::kMostProbedLists) return false;
      if (lists < 0) lists = index->buckets();
      return index->buckets() == lists;
    });
  }
  bool needs_host_index() const override { return true; }

  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    if (!chooses()) return false;
    changed_ = (files_.empty() ? make_up(keys, stream) : take_centroids(stream)) || changed_;
    labelled_.prepare(keys, [&](const GpuKeys& some, std::int64_t begin, std::int64_t end) {
      for (int layer = 0; layer < geometry_.layers; ++layer) label(some, layer, begin, end, stream);
    });
    return std::exchange(changed_, false);
  }
  void roll_back(int sequence, std::int64_t tokens) override { labelled_.roll_back(sequence, tokens); }
  void begin(const GpuStep& step) override {
    GpuBestKeys::begin(step);
    labelled_.begin(step, dense_);
  }
  void upload(cuda::StreamHandle stream) override {
    GpuBestKeys::upload(stream);
    clear_counters(stream);  // of keys that are scored
  }

  /// Centroids once for a group, then the keys that each of its heads has scored, and their places.
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t group = lists_per_head();
    const std::int32_t* const scored = of.counts + of.layer * counts_per_layer() + counts_per_layer() / 2;
    std::int64_t bytes = std::ssize(heads) * lists_ * geometry_.head_dim * 4;
    for (const int head : heads) {
      for (std::int64_t g = 0; g < group; ++g)
        bytes += scored[(std::int64_t{of.token} * geometry_.kv_heads + head) * group + g] *
                 (geometry_.key_row_bytes + std::int64_t{sizeof(Position)});
    }
    return bytes;
  }
  std::int64_t bytes() const override {
    return GpuBestKeys::bytes() + labeller_.bytes() + labels_.bytes() + centroids_.bytes() + scores_.bytes() +
           probed_.bytes() + probed_counts_.bytes() + wanted_.bytes() + workspace_.bytes();
  }

 private:
  void score(int layer, const cuda::Queries& queries, float* scores, cuda::ExponentialSum*,
             cuda::StreamHandle stream) override {
    labelled_.take_needed([&](const GpuKeys& keys, std::int64_t begin, std::int64_t end) {
      label(keys, layer, begin, end, stream);
    });
    const std::int64_t rows = std::int64_t{queries.count} * geometry_.query_heads;
    cuda::score_lists(queries, centroids_of(layer, 0), static_cast<int>(lists_), scores_.as<float>(), stream);
    cuda::top_k(scores_.as<float>(), rows, lists_, nullptr, wanted_.as<std::int32_t>(),
                probed_.as<std::int32_t>(), most_probed(), probed_counts_.as<std::int32_t>(),
                workspace_.as<void>(), stream);
    cuda::score_probed_keys(queries,
                            {.labels = labels_.as<std::uint16_t>() + layer * layer_labels(),
                             .sequence_stride = sequence_labels(),
                             .lists = static_cast<int>(lists_),
                             .probed = probed_.as<std::int32_t>(),
                             .counts = probed_counts_.as<std::int32_t>(),
                             .most = static_cast<int>(most_probed())},
                            dense_.sink, dense_.window, geometry_.max_tokens, scores, counters(layer, 1),
                            stream);
  }

  std::int64_t most_probed() const { return options_.probes_for(lists_); }
  std::int64_t layer_labels() const { return geometry_.kv_heads * geometry_.max_tokens; }
  std::int64_t sequence_labels() const { return geometry_.layers * layer_labels(); }
  float* centroids_of(int layer, int head) const {
    return centroids_.as<float>() +
           (std::int64_t{layer} * geometry_.kv_heads + head) * lists_ * geometry_.head_dim;
  }
  void label(const GpuKeys& keys, int layer, std::int64_t begin, std::int64_t end,
             cuda::StreamHandle stream) const {
    if (!files_.empty() && files_[static_cast<std::size_t>(layer)] == nullptr) return;
    for (const int head : geometry_.covered_heads(layer))
      labeller_.make(keys,
                     {.layer = layer,
                      .kv_head = head,
                      .roped = true,
                      .centroids = centroids_of(layer, head),
                      .buckets = lists_},
                     std::max(begin, dense_.sink), end,
                     labels_.as<std::uint16_t>() + keys.sequence * sequence_labels() +
                         layer * layer_labels() + head * geometry_.max_tokens,
                     stream);
  }

  /// Room for that many lists a head; heads that nobody asks for have centroids of 0, and their keys the list
  /// 0.
  void allocate(std::int64_t lists, cuda::StreamHandle stream) {
    lists_ = lists;
    const std::int64_t rows = std::int64_t{geometry_.most_queries} * geometry_.query_heads;
    const auto fresh = [](cuda::Buffer& buffer, std::int64_t bytes) {
      buffer = {};
      buffer = cuda::Buffer(bytes, "an inverted file");
    };
    fresh(centroids_, std::int64_t{geometry_.layers} * geometry_.kv_heads * lists * geometry_.head_dim * 4);
    fresh(scores_, rows * lists * 4);
    fresh(probed_, rows * most_probed() * 4);
    fresh(probed_counts_, rows * 4);
    fresh(wanted_, rows * 4);
    fresh(workspace_, cuda::select_workspace_bytes(rows, lists));
    for (const cuda::Buffer* zero : {&centroids_, &workspace_, &labels_})
      cuda::fill(zero->as<void>(), 0, zero->bytes(), stream);
    const std::vector<std::int32_t> wanted(static_cast<std::size_t>(rows),
                                           static_cast<std::int32_t>(most_probed()));
    // Pageable memory: the call returns once the bytes have left.
    cuda::copy(wanted_.as<void>(), wanted.data(), wanted_.bytes(), stream);
  }
  void put(int layer, int head, std::span<const float> centroids, cuda::StreamHandle stream) const {
    cuda::copy(centroids_of(layer, head), centroids.data(), std::ssize(centroids) * 4, stream);
  }
  /// The host's, where they are others than before: all keys go into new lists.
  bool take_centroids(cuda::StreamHandle stream) {
    std::vector<std::int64_t> versions(files_.size(), -1);
    std::int64_t lists = 1;
    for (std::size_t layer = 0; layer < files_.size(); ++layer) {
      if (files_[layer] == nullptr) continue;
      const KeyLists::Lists found = files_[layer]->key_lists();
      versions[layer] = found.version;
      lists = found.index->buckets();  // alike in all layers, see chooses()
    }
    if (versions == versions_) return false;
    std::fill(versions_.begin(), versions_.end(), -1);  // a failure must not leave half of it in use
    allocate(lists, stream);
    for (std::size_t layer = 0; layer < files_.size(); ++layer) {
      if (files_[layer] == nullptr) continue;
      const BucketIndex& index = *files_[layer]->key_lists().index;
      int own = 0;  // among the heads that the host's selector covers
      for (const int head : geometry_.covered_heads(static_cast<int>(layer)))
        put(static_cast<int>(layer), head, index.centroids(own++), stream);
    }
    labelled_.forget();
    versions_ = std::move(versions);
    return true;
  }
  /// Of the bench's keys, for layers of the same keys once.
  bool make_up(const GpuKeys& keys, cuda::StreamHandle stream) {
    if (lists_ > 0) return false;
    allocate(options_.lists_for(keys.tokens - dense_.sink), stream);
    const int distinct = geometry_.distinct_layers > 0 ? geometry_.distinct_layers : geometry_.layers;
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      for (int head = 0; head < geometry_.kv_heads; ++head) {
        const std::int64_t bytes = lists_ * geometry_.head_dim * 4;
        if (layer >= distinct)
          cuda::copy(centroids_of(layer, head), centroids_of(layer % distinct, head), bytes, stream);
        else
          put(layer, head, train_centroids_on_gpu(keys, layer, head, dense_.sink, true, lists_, stream),
              stream);
      }
    }
    return true;
  }

  IvfOptions options_;
  std::vector<const KeyLists*> files_;  // [L] null: dense; empty in a bench
  std::vector<std::int64_t> versions_;  // [L] of what is here
  std::int64_t lists_ = 0;              ///< of a head
  bool changed_ = false;  ///< other centroids, and no prepare has told of them yet: what came next failed
  BucketLabels labeller_;
  cuda::Buffer labels_;         // [sequences, L, Hkv, max_tokens] uint16
  cuda::Buffer centroids_;      // [L, Hkv, lists, d]
  cuda::Buffer scores_;         // [most_queries, Hq, lists]
  cuda::Buffer probed_;         // [most_queries, Hq, most_probed]
  cuda::Buffer probed_counts_;  // [most_queries, Hq]
  cuda::Buffer wanted_;         // [most_queries, Hq] of most_probed
  cuda::Buffer workspace_;
  IndexedKeys labelled_;
};

}  // namespace

/// A step of one token is a graph that no host value may enter, so its own key must be in the window.
std::unique_ptr<GpuSelector> make_gpu_ivf(const Spec& spec, const GpuGeometry& geometry,
                                          std::span<Selector* const> selectors) {
  if (spec.dense.window < 1 || geometry.head_dim % 4 != 0 || geometry.head_dim > cuda::kMostProbedDim ||
      IvfOptions::of(spec).k.of(geometry.max_tokens) < 1 ||
      IvfOptions::of(spec).lists_for(geometry.max_tokens) > cuda::kMostProbedLists)
    return nullptr;
  return std::make_unique<GpuIvf>(spec, geometry, parts_of<KeyLists>(selectors));
}

}  // namespace lode
