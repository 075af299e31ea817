// SPDX-License-Identifier: Apache-2.0
// double-sparsity on the GPU: keys are labelled on the device from its own rows, by the channels and levels
// that the host's selectors took from the text; a step scores all far keys by their labels and takes the
// best.
#include "select/baselines/double_sparsity.h"

#include "gpu/select/best_keys.h"
#include "gpu/select/key_index.h"
#include "kernels/cuda/baselines/label_keys.h"

namespace lode {

namespace {

class GpuDoubleSparsity final : public GpuBestKeys {
 public:
  GpuDoubleSparsity(const Spec& spec, const GpuGeometry& geometry, const DoubleSparsityOptions& options,
                    std::vector<const KeyLabeller*> labellers)
      : GpuBestKeys(spec, geometry, options.budget, options.per_kv_head ? Ranked::group : Ranked::query_head),
        options_(options),
        channels_(options.channels_for(geometry.head_dim)),
        labellers_(std::move(labellers)),
        versions_(labellers_.size(), 0),
        labelled_(geometry.sequences) {
    const std::int64_t heads = std::int64_t{geometry.layers} * geometry.kv_heads;
    labels_ = cuda::Buffer(geometry.sequences * labels(0, 0).sequence_stride, "the labels of keys");
    of_labels_ = cuda::Buffer(heads * channels_ * 4, "the channels of labels");
    levels_ = cuda::Buffer(heads * 2 * channels_ * 4, "the levels of labels");
    // Layers that choose nothing are labelled with the others, by channel 0.
    cuda::fill(of_labels_.as<void>(), 0, of_labels_.bytes(), geometry.stream);
    cuda::fill(levels_.as<void>(), 0, levels_.bytes(), geometry.stream);
    if (labellers_.empty()) make_up();
  }

  bool chooses() const override {
    return std::all_of(labellers_.begin(), labellers_.end(), [](const KeyLabeller* labeller) {
      return labeller == nullptr || labeller->key_labels().cache != nullptr;
    });
  }
  bool needs_host_index() const override { return true; }

  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    if (!chooses()) return false;
    take_channels(stream);
    labelled_.prepare(keys, [&](const GpuKeys& some, std::int64_t begin, std::int64_t end) {
      geometry_.for_layers([&](int layer, int layers) { label(some, layer, layers, begin, end, stream); });
    });
    return false;
  }
  void roll_back(int sequence, std::int64_t tokens) override { labelled_.roll_back(sequence, tokens); }
  void begin(const GpuStep& step) override {
    GpuBestKeys::begin(step);
    labelled_.begin(step, dense_);
  }

  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t far = far_keys(dense_, of.position);
    if (k_.of(far) >= far) return 0;
    return std::ssize(heads) * far * labels(0, 0).label_bytes();
  }
  std::int64_t bytes() const override {
    return GpuBestKeys::bytes() + labels_.bytes() + of_labels_.bytes() + levels_.bytes();
  }

 private:
  void score(int layer, const cuda::Queries& queries, float* scores, cuda::ExponentialSum* sums,
             cuda::StreamHandle stream) override {
    labelled_.take_needed([&](const GpuKeys& keys, std::int64_t begin, std::int64_t end) {
      label(keys, layer, 1, begin, end, stream);
    });
    cuda::score_labels(queries, labels(0, layer), dense_.sink, dense_.window, geometry_.max_tokens, scores,
                       sums, stream);
  }
  cuda::KeyLabels labels(int sequence, int layer) const {
    cuda::KeyLabels labels = {
        .channels = of_labels_.as<std::int32_t>() + layer * geometry_.kv_heads * channels_,
        .levels = levels_.as<float>() + layer * geometry_.kv_heads * 2 * channels_,
        .capacity = geometry_.max_tokens,
        .count = channels_,
        .bits = options_.bits,
        .number_bytes = static_cast<int>(geometry_.key_row_bytes / geometry_.head_dim)};
    const std::int64_t layer_bytes = labels.layer_bytes(geometry_.kv_heads);
    labels.sequence_stride = geometry_.layers * layer_bytes;
    labels.labels = labels_.as<char>() + sequence * labels.sequence_stride + layer * layer_bytes;
    return labels;
  }
  void label(const GpuKeys& keys, int layer, int layers, std::int64_t begin, std::int64_t end,
             cuda::StreamHandle stream) const {
    cuda::label_keys(keys.base + layer * keys.layout.layer_stride, keys.layout, layers,
                     std::max(begin, dense_.sink), end, labels(keys.sequence, layer), stream);
  }

  void put(int layer, int head, std::span<const std::int32_t> channels, const ChannelLevels& levels,
           cuda::StreamHandle stream) const {
    const std::int64_t at = (std::int64_t{layer} * geometry_.kv_heads + head) * channels_;
    // Pageable memory: the calls return once the bytes have left.
    cuda::copy(of_labels_.as<std::int32_t>() + at, channels.data(), channels_ * std::int64_t{4}, stream);
    if (options_.bits == 16) return;
    cuda::copy(levels_.as<float>() + 2 * at, levels.low.data(), channels_ * std::int64_t{4}, stream);
    cuda::copy(levels_.as<float>() + 2 * at + channels_, levels.step.data(), channels_ * std::int64_t{4},
               stream);
  }
  /// The host's, where they are others than before: all keys get new labels.
  void take_channels(cuda::StreamHandle stream) {
    for (std::size_t layer = 0; layer < labellers_.size(); ++layer) {
      if (labellers_[layer] == nullptr) continue;
      const KeyLabeller::Labels found = labellers_[layer]->key_labels();
      if (versions_[layer] == found.version) continue;
      int own = 0;  // among the heads that the host's selector covers
      for (const int head : geometry_.covered_heads(static_cast<int>(layer))) {
        put(static_cast<int>(layer), head, found.cache->channels(own), found.cache->levels(own), stream);
        ++own;
      }
      versions_[layer] = found.version;
      labelled_.forget();
    }
  }
  void make_up() const {
    constexpr float kSpan = 3.0f;
    std::vector<std::int32_t> channels;
    for (int c = 0; c < channels_; ++c) channels.push_back(c * geometry_.head_dim / channels_);
    const std::vector<float> least(channels.size(), -kSpan), most(channels.size(), kSpan);
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      for (int head = 0; head < geometry_.kv_heads; ++head)
        put(layer, head, channels, {options_.bits, least, most}, geometry_.stream);
    }
  }

  DoubleSparsityOptions options_;
  int channels_ = 0;                           // of a label
  std::vector<const KeyLabeller*> labellers_;  // [L] null: dense; empty in a bench
  std::vector<std::int64_t> versions_;         // [L] of what is here
  cuda::Buffer labels_;                        // [sequences, L, Hkv, max_tokens, label]
  cuda::Buffer of_labels_;                     // [L, Hkv, channels]
  cuda::Buffer levels_;                        // [L, Hkv, 2, channels]
  IndexedKeys labelled_;
};

}  // namespace

/// A step of one token is a graph that no host value may enter, so its own key must be in the window.
std::unique_ptr<GpuSelector> make_gpu_double_sparsity(const Spec& spec, const GpuGeometry& geometry,
                                                      std::span<Selector* const> selectors) {
  if (spec.dense.window < 1) return nullptr;
  return std::make_unique<GpuDoubleSparsity>(spec, geometry, DoubleSparsityOptions::of(spec),
                                             parts_of<KeyLabeller>(selectors));
}

}  // namespace lode
