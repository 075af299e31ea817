// SPDX-License-Identifier: Apache-2.0
// snapkv on the GPU: the keys that the host's selectors have chosen of the context are copied when they
// change; a step adds the keys behind the context (kernels/cuda/select/join_lists.h).
#include "select/baselines/snapkv.h"

#include <algorithm>

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/select/join_lists.h"

namespace lode {

namespace {

class GpuSnapKv final : public GpuSelector {
 public:
  GpuSnapKv(const Spec& spec, const GpuGeometry& geometry, std::vector<const KeyKeeper*> keepers)
      : dense_(spec.dense),
        geometry_(geometry),
        options_(SnapKvOptions::of(spec)),
        keepers_(std::move(keepers)),
        layers_(static_cast<std::size_t>(geometry.layers)),
        capacity_(std::max<std::int64_t>(1, far_keys(dense_, geometry.max_tokens - 1))),
        lists_(std::int64_t{geometry.most_queries} * geometry.kv_heads * lists_per_head()) {
    rows_ = cuda::Buffer(lists_ * capacity_ * 4, "the rows of kept keys");
    counts_ = cuda::Buffer(geometry.layers * lists_ * 4, "the counts of kept keys");
    cuda::fill(counts_.as<void>(), 0, counts_.bytes(), geometry.stream);
    source_of_head_ = cuda::Buffer(geometry.kv_heads * std::int64_t{4}, "the one source of kept keys");
    cuda::fill(source_of_head_.as<void>(), 0, source_of_head_.bytes(), geometry.stream);
    if (keepers_.empty()) make_up();
  }

  bool needs_host_index() const override { return true; }
  /// Where the keys begin that are attended one and all is in the captured graph.
  bool prepare(const GpuKeys&, cuda::StreamHandle stream) override {
    std::vector<Layer> fresh = layers_;
    bool changed = false;
    for (std::size_t layer = 0; layer < keepers_.size(); ++layer) {
      if (keepers_[layer] == nullptr) continue;
      const KeyKeeper::Kept kept = keepers_[layer]->kept_keys();
      if (fresh[layer].version == kept.version) continue;
      fresh[layer] = {.version = kept.version,
                      .rows = of_all_heads(static_cast<int>(layer), kept.rows),
                      .from = kept.from};
      changed = true;
    }
    if (!changed) return false;
    for (Layer& layer : layers_) layer.version = -1;  // a failure must not leave half of it in use
    upload_rows(fresh, stream);
    layers_ = std::move(fresh);
    return true;
  }
  void begin(const GpuStep&) override {}
  void upload(cuda::StreamHandle) override {}

  cuda::RowLists select(int layer, const cuda::Queries& queries, const float*,
                        cuda::StreamHandle stream) override {
    const std::int64_t lists = geometry_.kv_heads * lists_per_head();
    cuda::JoinTask task = {.of_head = source_of_head_.as<std::int32_t>(),
                           .rows = rows_.as<std::int32_t>(),
                           .counts = counts_.as<std::int32_t>() + layer * lists_,
                           .capacity = capacity_,
                           .lists_per_head = lists_per_head(),
                           .sink = dense_.sink,
                           .window = dense_.window};
    task.source[0] = {.rows = kept_rows_.as<std::int32_t>() + layer * lists * most_kept_,
                      .counts = kept_counts_.as<std::int32_t>() + layer * lists,
                      .capacity = most_kept_,
                      .lists_per_head = lists_per_head(),
                      .same_for_all = true,
                      .from = layers_[static_cast<std::size_t>(layer)].from};
    cuda::join_lists(queries, task, stream);
    return task.lists();
  }

  std::int64_t counts_per_layer() const override { return lists_; }
  int lists_per_head() const override {
    return options_.per_kv_head ? 1 : geometry_.query_heads / geometry_.kv_heads;
  }
  /// The rows that were chosen; what is behind them needs none.
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t far_end = of.position + 1 - dense_.window;
    std::int64_t rows = 0;
    for (const int head : heads) {
      for (int i = 0; i < lists_per_head(); ++i) {
        const std::vector<Position>& own = layers_[static_cast<std::size_t>(of.layer)]
                                               .rows[static_cast<std::size_t>(head * lists_per_head() + i)];
        rows += std::lower_bound(own.begin(), own.end(), far_end) - own.begin();
      }
    }
    return rows * std::int64_t{sizeof(Position)};
  }
  std::int64_t bytes() const override {
    return rows_.bytes() + counts_.bytes() + kept_rows_.bytes() + kept_counts_.bytes() +
           source_of_head_.bytes();
  }

 private:
  /// As the host has it, lists of heads that its selector does not cover empty.
  struct Layer {
    std::int64_t version = -1;
    std::vector<std::vector<Position>> rows;  // [Hkv, lists_per_head]
    Position from = 0;
  };

  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  std::vector<std::vector<Position>> of_all_heads(int layer,
                                                  std::span<const std::vector<Position>> own) const {
    const auto each = static_cast<std::size_t>(lists_per_head());
    const std::vector<int> covered = geometry_.covered_heads(layer);
    std::vector<std::vector<Position>> all(static_cast<std::size_t>(geometry_.kv_heads) * each);
    for (std::size_t i = 0; i < own.size(); ++i)
      all[static_cast<std::size_t>(covered[i / each]) * each + i % each] = own[i];
    return all;
  }
  void upload_rows(const std::vector<Layer>& layers, cuda::StreamHandle stream) {
    const std::int64_t lists = geometry_.kv_heads * lists_per_head();
    most_kept_ = 1;
    for (const Layer& layer : layers)
      for (const std::vector<Position>& rows : layer.rows)
        most_kept_ = std::max(most_kept_, std::ssize(rows));
    std::vector<std::int32_t> rows(static_cast<std::size_t>(geometry_.layers * lists * most_kept_)), counts;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      for (std::int64_t list = 0; list < lists; ++list) {
        const bool none = layers[layer].rows.empty();
        const std::vector<Position> own =
            none ? std::vector<Position>{} : layers[layer].rows[static_cast<std::size_t>(list)];
        std::copy(own.begin(), own.end(), rows.begin() + std::ssize(counts) * most_kept_);
        counts.push_back(static_cast<std::int32_t>(own.size()));
      }
    }
    kept_rows_ = {};
    kept_rows_ = cuda::Buffer(std::ssize(rows) * 4, "kept keys");
    kept_counts_ = cuda::Buffer(std::ssize(counts) * 4, "the numbers of kept keys");
    // Pageable memory: the calls return once the bytes have left.
    cuda::copy(kept_rows_.as<void>(), rows.data(), kept_rows_.bytes(), stream);
    cuda::copy(kept_counts_.as<void>(), counts.data(), kept_counts_.bytes(), stream);
  }
  /// Keys of a context that is as long as there is room.
  void make_up() {
    const std::int64_t far = capacity_ - std::max<std::int64_t>(0, options_.window - dense_.window),
                       wanted = std::max<std::int64_t>(0, std::min(far, options_.budget(far)));
    std::vector<Position> rows;
    for (std::int64_t i = 0; i < wanted; ++i)
      rows.push_back(static_cast<Position>(dense_.sink + i * far / wanted));
    for (Layer& layer : layers_)
      layer = {.version = 0,
               .rows = std::vector<std::vector<Position>>(
                   static_cast<std::size_t>(geometry_.kv_heads * lists_per_head()), rows),
               .from = static_cast<Position>(dense_.sink + far)};
    upload_rows(layers_, geometry_.stream);
  }

  LocalWindow dense_;
  GpuGeometry geometry_;
  SnapKvOptions options_;
  std::vector<const KeyKeeper*> keepers_;  // [L] null: dense; empty in a bench
  std::vector<Layer> layers_;              // [L]
  std::int64_t capacity_ = 1, lists_ = 0;
  std::int64_t most_kept_ = 1;   ///< of a list
  cuda::Buffer kept_rows_;       // [L, Hkv, lists_per_head, most_kept]
  cuda::Buffer kept_counts_;     // [L, Hkv, lists_per_head]
  cuda::Buffer source_of_head_;  // [Hkv] of zero
  cuda::Buffer rows_;            // [lists, capacity]
  cuda::Buffer counts_;          // [L, lists]
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_snapkv(const Spec& spec, const GpuGeometry& geometry,
                                             std::span<Selector* const> selectors) {
  return std::make_unique<GpuSnapKv>(spec, geometry, parts_of<KeyKeeper>(selectors));
}

}  // namespace lode
