// SPDX-License-Identifier: Apache-2.0
// topk by count and score on the GPU, per query head or per KV head: every far key is scored, the best are
// compacted.
#include <algorithm>

#include "gpu/selectors.h"
#include "kernels/cuda/device.h"

namespace lode {

namespace {

class GpuTopK final : public GpuSelector {
 public:
  GpuTopK(const Spec& spec, const GpuGeometry& geometry, Amount k, bool per_kv_head)
      : dense_(spec.dense), geometry_(geometry), k_(k), per_kv_head_(per_kv_head) {
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
    cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), geometry.stream);
  }

  void begin(const GpuStep& step) override {
    const std::span<const cuda::QueryToken> queries = step.queries;
    const std::int64_t per_query = lists_ / geometry_.most_queries;
    used_ = per_query * std::ssize(queries);
    for (std::int64_t i = 0; i < used_; ++i) {
      const std::int64_t at = queries[static_cast<std::size_t>(i / per_query)].position,
                         far = far_keys(dense_, at);
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
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  std::int64_t counts_per_layer() const override { return lists_; }
  int lists_per_head() const override {
    return per_kv_head_ ? 1 : geometry_.query_heads / geometry_.kv_heads;
  }
  std::int64_t select_bytes(std::int64_t position, std::int64_t) const override {
    return geometry_.kv_heads * far_keys(dense_, position) * geometry_.key_row_bytes;
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
  std::int64_t capacity_ = 0;
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

std::unique_ptr<GpuSelector> make_gpu_topk(const Spec& spec, const GpuGeometry& geometry) {
  if (spec.text("mass") || spec.text("by").value_or("score") != "score") return nullptr;
  return std::make_unique<GpuTopK>(spec, geometry, spec.amount("k", {100, false}),
                                   spec.text("per").value_or("query-head") == "kv-head");
}

}  // namespace lode
