// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/best_keys.h"

#include <algorithm>

namespace lode {

GpuBestKeys::GpuBestKeys(const Spec& spec, const GpuGeometry& geometry, Amount k, Ranked ranked, int counters)
    : dense_(spec.dense), geometry_(geometry), k_(k), ranked_(ranked), counters_(counters) {
  const std::int64_t n = geometry.max_tokens, queries = geometry.most_queries;
  const std::int64_t most_far = far_keys(dense_, n - 1);
  capacity_ = std::max<std::int64_t>(1, k_.of(most_far));
  lists_ = queries * (ranked == Ranked::query_head ? geometry.query_heads : geometry.kv_heads);
  scores_ = cuda::Buffer((ranked == Ranked::group ? queries * geometry.query_heads : lists_) * n * 4,
                         "the scores of keys");
  if (ranked == Ranked::group) {
    constexpr std::int64_t kBytes = sizeof(cuda::ExponentialSum);
    sums_ =
        cuda::Buffer(queries * geometry.query_heads * cuda::sums_of_keys(n) * kBytes, "the sums of scores");
    shared_ = cuda::Buffer(lists_ * n * 4, "the shared scores of keys");
  }
  rows_ = cuda::Buffer(lists_ * capacity_ * 4, "the rows of the best keys");
  counts_ = cuda::Buffer(geometry.layers * counters * lists_ * 4, "the counts of the best keys");
  wanted_ = cuda::Buffer(2 * lists_ * 4, "the counts wanted of the best keys");
  staged_ = cuda::PinnedBuffer(2 * lists_ * 4);
  workspace_ = cuda::Buffer(cuda::select_workspace_bytes(lists_, n), "the workspace of the best keys");
  cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), geometry.stream);
}

void GpuBestKeys::begin(const GpuStep& step) {
  const std::span<const cuda::QueryToken> queries = step.queries;
  const std::int64_t per_query = lists_ / geometry_.most_queries;
  used_ = per_query * std::ssize(queries);
  for (std::int64_t i = 0; i < used_; ++i) {
    const std::int64_t at = queries[static_cast<std::size_t>(i / per_query)].position,
                       far = far_keys(dense_, at);
    staged_.as<std::int32_t>()[i] = static_cast<std::int32_t>(k_.of(far));
    staged_.as<std::int32_t>()[lists_ + i] = static_cast<std::int32_t>(far > 0 ? at + 1 - dense_.window : 0);
  }
}

void GpuBestKeys::upload(cuda::StreamHandle stream) {
  cuda::copy_numbers(wanted_.as<void>(), staged_, wanted_.bytes(), stream);
}

cuda::RowLists GpuBestKeys::select(int layer, const cuda::Queries& queries, const float*,
                                   cuda::StreamHandle stream) {
  const std::int64_t n = geometry_.max_tokens;
  const bool shared = ranked_ == Ranked::group;
  auto* const sums = shared ? sums_.as<cuda::ExponentialSum>() : nullptr;
  score(layer, queries, scores_.as<float>(), sums, stream);
  if (shared)
    cuda::share_scores(scores_.as<float>(), sums, queries, dense_.sink, dense_.window, n, shared_.as<float>(),
                       stream);
  std::int32_t* const counts = counters(layer, 0);
  cuda::top_k(shared ? shared_.as<float>() : scores_.as<float>(), used_, n,
              wanted_.as<std::int32_t>() + lists_, wanted_.as<std::int32_t>(), rows_.as<std::int32_t>(),
              capacity_, counts, workspace_.as<void>(), stream);
  return {.rows = rows_.as<std::int32_t>(),
          .counts = counts,
          .capacity = capacity_,
          .lists_per_head = lists_per_head(),
          .sink = dense_.sink,
          .window = dense_.window};
}

std::int64_t GpuBestKeys::bytes() const {
  return scores_.bytes() + sums_.bytes() + shared_.bytes() + rows_.bytes() + counts_.bytes() +
         wanted_.bytes() + workspace_.bytes();
}

}  // namespace lode
