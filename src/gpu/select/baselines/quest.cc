// SPDX-License-Identifier: Apache-2.0
// quest on the GPU: bounds of pages are made on the device from its own rows, and a step scores pages, takes
// the best and lists their keys. The levels of coded bounds are those that the host's selectors took from the
// text. Given the same scores the keys chosen are the host's.
#include "select/baselines/quest.h"

#include <algorithm>

#include "gpu/select/key_index.h"
#include "kernels/cuda/baselines/page_bounds.h"
#include "kernels/cuda/device/device.h"

namespace lode {

namespace {

class GpuQuest final : public GpuSelector {
 public:
  GpuQuest(const Spec& spec, const GpuGeometry& geometry, std::vector<const PageBounder*> bounders)
      : dense_(spec.dense),
        geometry_(geometry),
        options_(QuestOptions::of(spec)),
        bounders_(std::move(bounders)),
        versions_(bounders_.size(), 0),
        budgets_(options_.budget, geometry.most_queries),
        bounded_(geometry.sequences) {
    const std::int64_t n = geometry.max_tokens, queries = geometry.most_queries;
    const std::int64_t most_far = far_keys(dense_, n - 1);
    capacity_ = std::max<std::int64_t>(1, options_.budget.of(most_far));
    room_ = std::max<std::int64_t>(1, (n - dense_.sink) / options_.page);
    lists_ = queries * geometry.kv_heads * lists_per_head();
    const cuda::PageBounds shape = bounds(0, 0);
    bounds_ = cuda::Buffer(geometry.sequences * shape.sequence_stride, "the bounds of pages");
    if (shape.coded()) {  // Layers that choose nothing have levels, too.
      levels_ = cuda::Buffer(geometry.layers * levels_per_layer() * 4, "the levels of bounds");
      cuda::fill(levels_.as<void>(), 0, levels_.bytes(), geometry.stream);
    }
    scores_ = cuda::Buffer(lists_ * room_ * 4, "the scores of pages");
    rows_ = cuda::Buffer(lists_ * capacity_ * 4, "the rows of chosen pages");
    counts_ = cuda::Buffer(geometry.layers * lists_ * 4, "the counts of chosen pages");
    if (shape.coded() && bounders_.empty()) make_up_levels();
  }

  bool chooses() const override {
    return std::all_of(bounders_.begin(), bounders_.end(), [](const PageBounder* bounder) {
      return bounder == nullptr || bounder->page_levels().bounds != nullptr;
    });
  }
  bool needs_host_index() const override { return !bounders_.empty(); }

  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    if (!chooses()) return false;
    take_levels(stream);
    bounded_.prepare(keys, [&](const GpuKeys& some, std::int64_t begin, std::int64_t end) {
      geometry_.for_layers([&](int layer, int layers) { bound(some, layer, layers, begin, end, stream); });
    });
    return false;
  }
  void roll_back(int sequence, std::int64_t tokens) override { bounded_.roll_back(sequence, tokens); }

  void begin(const GpuStep& step) override {
    bounded_.begin(step, dense_);
    budgets_.begin(step, dense_);
  }
  void upload(cuda::StreamHandle stream) override { budgets_.upload(stream); }
  bool has_news() const override { return budgets_.has_news(); }

  cuda::RowLists select(int layer, const cuda::Queries& queries, const float*,
                        cuda::StreamHandle stream) override {
    cuda::PageBounds pages = bounds(0, layer);
    pages.fresh = bounded_.take_needed([&](const GpuKeys& keys, std::int64_t begin, std::int64_t end) {
      bound(keys, layer, 1, begin, end, stream);
    });
    cuda::score_pages(queries, pages, options_.per_kv_head, dense_.window, geometry_.max_tokens,
                      scores_.as<float>(), room_, stream);
    const std::int64_t per_query = lists_ / geometry_.most_queries;
    std::int32_t* const counts = counts_.as<std::int32_t>() + layer * lists_;
    cuda::top_pages(scores_.as<float>(), per_query * queries.count, room_,
                    {.tokens = queries.tokens,
                     .budget = budgets_.get(),
                     .lists_of_query = static_cast<int>(per_query),
                     .page = static_cast<int>(options_.page),
                     .sink = dense_.sink,
                     .window = dense_.window},
                    rows_.as<std::int32_t>(), capacity_, counts, stream);
    return {.rows = rows_.as<std::int32_t>(),
            .counts = counts,
            .capacity = capacity_,
            .lists_per_head = lists_per_head(),
            .sink = dense_.sink,
            .window = dense_.window};
  }

  std::int64_t counts_per_layer() const override { return lists_; }
  int lists_per_head() const override {
    return options_.per_kv_head ? 1 : geometry_.query_heads / geometry_.kv_heads;
  }
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t far = far_keys(dense_, of.position);
    if (options_.budget.of(far) >= far) return 0;
    return std::ssize(heads) * (far / options_.page) * page_bytes();
  }
  std::int64_t bytes() const override {
    return bounds_.bytes() + levels_.bytes() + scores_.bytes() + rows_.bytes() + counts_.bytes() +
           budgets_.bytes();
  }

 private:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  /// Whole pages in front of a position.
  std::int64_t pages_below(std::int64_t position) const {
    return std::max<std::int64_t>(0, position - dense_.sink) / options_.page;
  }
  std::int64_t page_bytes() const {
    return options_.bits < 16 ? std::int64_t{2} * geometry_.head_dim * options_.bits / 8
                              : 2 * geometry_.key_row_bytes;
  }
  std::int64_t layer_bytes() const { return geometry_.kv_heads * room_ * page_bytes(); }
  std::int64_t levels_per_layer() const { return std::int64_t{2} * geometry_.kv_heads * geometry_.head_dim; }
  cuda::PageBounds bounds(int sequence, int layer) const {
    const std::int64_t stride = geometry_.layers * layer_bytes();
    return {.bounds = bounds_.as<char>() + sequence * stride + layer * layer_bytes(),
            .levels = options_.bits < 16 ? levels_.as<float>() + layer * levels_per_layer() : nullptr,
            .sequence_stride = stride,
            .capacity = room_,
            .sink = dense_.sink,
            .page = static_cast<int>(options_.page),
            .bits = options_.bits};
  }
  /// The pages that are whole with keys [begin, end).
  void bound(const GpuKeys& keys, int layer, int layers, std::int64_t begin, std::int64_t end,
             cuda::StreamHandle stream) const {
    cuda::bound_pages(keys.base + layer * keys.layout.layer_stride, keys.layout, layers, pages_below(begin),
                      pages_below(end), bounds(keys.sequence, layer), stream);
  }

  void put_levels(int layer, int head, const ChannelLevels& levels, cuda::StreamHandle stream) const {
    const std::int64_t d = geometry_.head_dim;
    float* const to = levels_.as<float>() + layer * levels_per_layer() + head * 2 * d;
    // Pageable memory: the calls return once the bytes have left.
    cuda::copy(to, levels.low.data(), d * 4, stream);
    cuda::copy(to + d, levels.step.data(), d * 4, stream);
  }
  /// The host's, where they are others than before: all pages get new codes.
  void take_levels(cuda::StreamHandle stream) {
    for (std::size_t layer = 0; layer < bounders_.size(); ++layer) {
      if (bounders_[layer] == nullptr) continue;
      const PageBounder::Levels found = bounders_[layer]->page_levels();
      if (versions_[layer] == found.version) continue;
      int own = 0;  // among the heads that the host's selector covers
      for (const int head : geometry_.covered_heads(static_cast<int>(layer)))
        put_levels(static_cast<int>(layer), head, found.bounds->levels(own++), stream);
      versions_[layer] = found.version;
      bounded_.forget();
    }
  }
  void make_up_levels() const {
    constexpr float kSpan = 3.0f;
    const auto d = static_cast<std::size_t>(geometry_.head_dim);
    const std::vector<float> least(d, -kSpan), largest(d, kSpan);
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      for (int head = 0; head < geometry_.kv_heads; ++head)
        put_levels(layer, head, {options_.bits, least, largest}, geometry_.stream);
    }
  }

  LocalWindow dense_;
  GpuGeometry geometry_;
  QuestOptions options_;
  std::vector<const PageBounder*> bounders_;  // [L] null: dense; empty where levels need none
  std::vector<std::int64_t> versions_;        // [L] of the levels that are here
  std::int64_t capacity_ = 0;
  std::int64_t room_ = 0;   ///< pages of a head
  std::int64_t lists_ = 0;  ///< of most_queries
  cuda::Buffer bounds_;     // [sequences, L, Hkv, room, 2, d]
  cuda::Buffer levels_;     // [L, Hkv, 2, d]
  cuda::Buffer scores_;     // [lists, room]
  cuda::Buffer rows_;       // [lists, capacity]
  cuda::Buffer counts_;     // [L, lists]
  StepBudgets budgets_;
  IndexedKeys bounded_;
};

}  // namespace

/// A step of one token is a graph that no host value may enter, so its own key must be in the window.
std::unique_ptr<GpuSelector> make_gpu_quest(const Spec& spec, const GpuGeometry& geometry,
                                            std::span<Selector* const> selectors) {
  if (spec.dense.window < 1 || !cuda::can_bound_pages(geometry.head_dim)) return nullptr;
  const bool coded = QuestOptions::of(spec).bits < 16;  // then by levels that the host takes from the text
  return std::make_unique<GpuQuest>(spec, geometry,
                                    parts_of<PageBounder>(coded ? selectors : std::span<Selector* const>{}));
}

}  // namespace lode
