// SPDX-License-Identifier: Apache-2.0
// pqcache on the GPU: keys are coded on the device from its own rows, by the centroids that the host's
// selectors took from the text; a step scores all far keys by their codes and takes the best.
#include "select/baselines/pqcache.h"

#include "ann/product_quantizer.h"
#include "base/rng.h"
#include "gpu/select/best_keys.h"
#include "gpu/select/key_index.h"
#include "kernels/cuda/baselines/pq_encode.h"

namespace lode {

namespace {

class GpuPqCache final : public GpuBestKeys {
 public:
  GpuPqCache(const Spec& spec, const GpuGeometry& geometry, const PqCacheOptions& options,
             std::vector<const KeyCoder*> coders)
      : GpuBestKeys(spec, geometry, options.budget, options.per_kv_head ? Ranked::group : Ranked::query_head),
        options_(options),
        coders_(std::move(coders)),
        versions_(coders_.size(), 0),
        coded_(geometry.sequences) {
    const std::int64_t heads = std::int64_t{geometry.layers} * geometry.kv_heads;
    codes_ = cuda::Buffer(geometry.sequences * codes(0, 0).sequence_stride, "the codes of keys");
    centroids_ = cuda::Buffer(heads * codes(0, 0).centroids_of_head() * 4, "the centroids of keys");
    tables_ = cuda::Buffer(
        cuda::code_tables_bytes(geometry.most_queries, geometry.query_heads, geometry.kv_heads, codes(0, 0)),
        "the tables of codes");
    // Layers that choose nothing are coded with the others.
    cuda::fill(centroids_.as<void>(), 0, centroids_.bytes(), geometry.stream);
    if (coders_.empty()) make_up();
  }

  bool chooses() const override {
    return std::all_of(coders_.begin(), coders_.end(), [](const KeyCoder* coder) {
      return coder == nullptr || coder->codebooks().codes != nullptr;
    });
  }
  bool needs_host_index() const override { return true; }

  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    if (!chooses()) return false;
    take_centroids(stream);
    coded_.prepare(keys, [&](const GpuKeys& some, std::int64_t begin, std::int64_t end) {
      geometry_.for_layers([&](int layer, int layers) { code(some, layer, layers, begin, end, stream); });
    });
    return false;
  }
  void roll_back(int sequence, std::int64_t tokens) override { coded_.roll_back(sequence, tokens); }
  void begin(const GpuStep& step) override {
    GpuBestKeys::begin(step);
    coded_.begin(step, dense_);
  }

  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t far = far_keys(dense_, of.position);
    if (k_.of(far) >= far) return 0;
    return std::ssize(heads) * (far * codes(0, 0).planes() + levels_ * geometry_.head_dim * 4);
  }
  std::int64_t bytes() const override {
    return GpuBestKeys::bytes() + codes_.bytes() + centroids_.bytes() + tables_.bytes();
  }

 private:
  void score(int layer, const cuda::Queries& queries, float* scores, cuda::ExponentialSum* sums,
             cuda::StreamHandle stream) override {
    coded_.take_needed([&](const GpuKeys& keys, std::int64_t begin, std::int64_t end) {
      code(keys, layer, 1, begin, end, stream);
    });
    cuda::score_codes(queries, codes(0, layer), dense_.sink, dense_.window, geometry_.max_tokens,
                      tables_.as<void>(), scores, sums, stream);
  }
  cuda::KeyCodes codes(int sequence, int layer) const {
    cuda::KeyCodes codes = {.capacity = geometry_.max_tokens,
                            .parts = options_.m,
                            .width = geometry_.head_dim / options_.m,
                            .bits = options_.bits};
    const std::int64_t layer_bytes = codes.layer_bytes(geometry_.kv_heads);
    codes.sequence_stride = geometry_.layers * layer_bytes;
    codes.codes = codes_.as<std::uint8_t>() + sequence * codes.sequence_stride + layer * layer_bytes;
    codes.centroids = centroids_.as<float>() + layer * geometry_.kv_heads * codes.centroids_of_head();
    return codes;
  }
  void code(const GpuKeys& keys, int layer, int layers, std::int64_t begin, std::int64_t end,
            cuda::StreamHandle stream) const {
    cuda::code_keys(keys.base + layer * keys.layout.layer_stride, keys.layout, layers,
                    std::max(begin, dense_.sink), end, codes(keys.sequence, layer), stream);
  }

  void put(int layer, int head, const ProductQuantizer& quantizer, cuda::StreamHandle stream) const {
    const cuda::KeyCodes to = codes(0, layer);
    const std::int64_t entries = to.entries(), more = to.width + 1;
    std::vector<float> by_channel(static_cast<std::size_t>(to.centroids_of_head()), 0.0f);
    for (int part = 0; part < to.parts; ++part) {
      const std::vector<float> lifted = lifted_centroids(
          {quantizer.part(part), static_cast<std::size_t>(std::int64_t{quantizer.levels} * to.width)},
          to.width);
      float* const own = by_channel.data() + part * more * entries;
      std::fill_n(own + to.width * entries, entries, -std::numeric_limits<float>::infinity());
      for (std::int64_t i = 0; i < std::ssize(lifted); ++i)
        own[i % more * entries + i / more] = lifted[static_cast<std::size_t>(i)];
    }
    // Pageable memory: the call returns once the bytes have left.
    cuda::copy(
        centroids_.as<float>() + (std::int64_t{layer} * geometry_.kv_heads + head) * to.centroids_of_head(),
        by_channel.data(), std::ssize(by_channel) * 4, stream);
  }
  /// The host's, where they are others than before: all keys get new codes.
  void take_centroids(cuda::StreamHandle stream) {
    for (std::size_t layer = 0; layer < coders_.size(); ++layer) {
      if (coders_[layer] == nullptr) continue;
      const KeyCoder::Codebooks found = coders_[layer]->codebooks();
      if (versions_[layer] == found.version) continue;
      int own = 0;  // among the heads that the host's selector covers
      for (const int head : geometry_.covered_heads(static_cast<int>(layer)))
        put(static_cast<int>(layer), head, found.codes->quantizer(own++), stream);
      levels_ = found.codes->quantizer(0).levels;
      versions_[layer] = found.version;
      coded_.forget();
    }
  }
  void make_up() {
    levels_ = std::int64_t{1} << options_.bits;
    Rng rng(1);
    ProductQuantizer quantizer = {.parts = options_.m,
                                  .width = geometry_.head_dim / options_.m,
                                  .levels = static_cast<int>(levels_),
                                  .centroids = {}};
    for (std::int64_t i = 0; i < levels_ * quantizer.d(); ++i)
      quantizer.centroids.push_back(static_cast<float>(rng.normal()));
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      for (int head = 0; head < geometry_.kv_heads; ++head) put(layer, head, quantizer, geometry_.stream);
    }
  }

  PqCacheOptions options_;
  std::vector<const KeyCoder*> coders_;  // [L] null: dense; empty in a bench
  std::vector<std::int64_t> versions_;   // [L] of what is here
  std::int64_t levels_ = 0;              ///< centroids of a part
  cuda::Buffer codes_;                   // [sequences, L, Hkv, planes, max_tokens]
  cuda::Buffer centroids_;               // [L, Hkv, m, d / m + 1, entries]
  cuda::Buffer tables_;                  // of score_codes
  IndexedKeys coded_;
};

}  // namespace

/// A step of one token is a graph that no host value may enter, so its own key must be in the window.
std::unique_ptr<GpuSelector> make_gpu_pqcache(const Spec& spec, const GpuGeometry& geometry,
                                              std::span<Selector* const> selectors) {
  const PqCacheOptions options = PqCacheOptions::of(spec);
  if (spec.dense.window < 1 || geometry.head_dim % options.m != 0) return nullptr;
  return std::make_unique<GpuPqCache>(spec, geometry, options, parts_of<KeyCoder>(selectors));
}

}  // namespace lode
