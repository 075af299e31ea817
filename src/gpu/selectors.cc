// SPDX-License-Identifier: Apache-2.0
#include "gpu/selectors.h"

#include <algorithm>

#include "kernels/cuda/device.h"

namespace lode {

namespace {

/// Far keys of a query at `position`.
std::int64_t far_keys(const DenseParts& dense, std::int64_t position) {
  return std::max<std::int64_t>(0, position + 1 - dense.window - dense.sink);
}

/// streaming: every list is empty.
class GpuStreaming final : public GpuSelector {
 public:
  GpuStreaming(const Spec& spec, const GpuGeometry& geometry)
      : dense_(spec.dense),
        counts_(std::int64_t{geometry.most_queries} * geometry.kv_heads * 4, "the counts of streaming") {
    cuda::fill(counts_.as<void>(), 0, counts_.bytes(), nullptr);
  }
  void begin(std::int64_t, int) override {}
  void upload(cuda::StreamHandle) override {}
  cuda::RowLists select(int, const cuda::Queries&, const float*, cuda::StreamHandle) override {
    return {.rows = counts_.as<std::int32_t>(),
            .counts = counts_.as<std::int32_t>(),
            .capacity = 1,
            .lists_per_head = 1,
            .sink = dense_.sink,
            .window = dense_.window};
  }
  const std::int32_t* counts(int) const override { return counts_.as<std::int32_t>(); }
  int lists_per_head() const override { return 1; }
  std::int64_t select_bytes(std::int64_t) const override { return 0; }
  std::int64_t bytes() const override { return counts_.bytes(); }

 private:
  DenseParts dense_;
  cuda::Buffer counts_;  // [most_queries, Hkv] of zero
};

/// topk by count and score, per query head or per KV head: every far key is scored, the best are compacted.
class GpuTopK final : public GpuSelector {
 public:
  GpuTopK(const Spec& spec, const GpuGeometry& geometry, Amount k, bool per_kv_head,
          std::int64_t key_row_bytes)
      : dense_(spec.dense),
        geometry_(geometry),
        k_(k),
        per_kv_head_(per_kv_head),
        key_row_bytes_(key_row_bytes) {
    const std::int64_t n = geometry.max_tokens, queries = geometry.most_queries;
    const std::int64_t most_far = far_keys(dense_, n - 1);
    capacity_ = std::max<std::int64_t>(1, k_.of(most_far));
    lists_ = queries * (per_kv_head ? geometry.kv_heads : geometry.query_heads);
    scores_ = cuda::Buffer(queries * geometry.query_heads * n * 4, "the scores of topk");
    if (per_kv_head) shared_ = cuda::Buffer(lists_ * n * 4, "the shared scores of topk");
    rows_ = cuda::Buffer(lists_ * capacity_ * 4, "the rows of topk");
    counts_ = cuda::Buffer(geometry.layers * lists_ * 4, "the counts of topk");
    wanted_ = cuda::Buffer(2 * lists_ * 4, "the counts wanted of topk");
    staged_ = cuda::PinnedBuffer(2 * lists_ * 4);
    workspace_ = cuda::Buffer(cuda::select_workspace_bytes(lists_, n), "the workspace of topk");
    cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), nullptr);
  }

  void begin(std::int64_t position, int count) override {
    used_ = lists_ / geometry_.most_queries * count;
    const std::int64_t per_query = lists_ / geometry_.most_queries;
    for (std::int64_t i = 0; i < used_; ++i) {
      const std::int64_t at = position + i / per_query, far = far_keys(dense_, at);
      staged_.as<std::int32_t>()[i] = static_cast<std::int32_t>(k_.of(far));
      staged_.as<std::int32_t>()[lists_ + i] =
          static_cast<std::int32_t>(far > 0 ? at + 1 - dense_.window : 0);
    }
  }
  void upload(cuda::StreamHandle stream) override {
    cuda::copy(wanted_.as<void>(), staged_.as<void>(), wanted_.bytes(), stream);
  }
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float*,
                        cuda::StreamHandle stream) override {
    const std::int64_t n = geometry_.max_tokens;
    cuda::score_keys(queries, dense_.sink, dense_.window, n, scores_.as<float>(), stream);
    if (per_kv_head_)
      cuda::share_scores(scores_.as<float>(), queries, dense_.window, n, shared_.as<float>(), stream);
    auto* const counts = counts_.as<std::int32_t>() + layer * lists_;
    cuda::top_k(per_kv_head_ ? shared_.as<float>() : scores_.as<float>(), used_, n,
                wanted_.as<std::int32_t>() + lists_, wanted_.as<std::int32_t>(), rows_.as<std::int32_t>(),
                capacity_, counts, workspace_.as<void>(), stream);
    return {.rows = rows_.as<std::int32_t>(),
            .counts = counts,
            .capacity = capacity_,
            .lists_per_head = lists_per_head(),
            .sink = dense_.sink,
            .window = dense_.window};
  }
  const std::int32_t* counts(int layer) const override { return counts_.as<std::int32_t>() + layer * lists_; }
  int lists_per_head() const override {
    return per_kv_head_ ? 1 : geometry_.query_heads / geometry_.kv_heads;
  }
  std::int64_t select_bytes(std::int64_t position) const override {
    return geometry_.kv_heads * far_keys(dense_, position) * key_row_bytes_;
  }
  std::int64_t bytes() const override {
    return scores_.bytes() + shared_.bytes() + rows_.bytes() + counts_.bytes() + wanted_.bytes() +
           workspace_.bytes();
  }

 private:
  DenseParts dense_;
  GpuGeometry geometry_;
  Amount k_;
  bool per_kv_head_ = false;
  std::int64_t key_row_bytes_ = 0, capacity_ = 0;
  std::int64_t lists_ = 0, used_ = 0;  ///< of most_queries, of the running step
  cuda::Buffer scores_;                // [most_queries, Hq, max_tokens]
  cuda::Buffer shared_;                // [most_queries, Hkv, max_tokens], per KV head only
  cuda::Buffer rows_;                  // [lists, capacity]
  cuda::Buffer counts_;                // [L, lists]
  cuda::Buffer wanted_;                // [2, lists]: k, then the end of the far keys
  cuda::PinnedBuffer staged_;          // of wanted_
  cuda::Buffer workspace_;
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_selector(const Spec& spec, const GpuGeometry& geometry,
                                               std::int64_t key_row_bytes) {
  if (spec.name == "streaming") return std::make_unique<GpuStreaming>(spec, geometry);
  const bool by_count = !spec.text("mass") && spec.text("by").value_or("score") == "score";
  if (spec.name == "topk" && by_count) {
    return std::make_unique<GpuTopK>(spec, geometry, spec.amount("k", {100, false}),
                                     spec.text("per").value_or("query-head") == "kv-head", key_row_bytes);
  }
  return nullptr;
}

}  // namespace lode
