// SPDX-License-Identifier: Apache-2.0
// topk by count and score on the GPU, per query head or per KV head: every far key is scored, the best are
// compacted.
#include "gpu/select/best_keys.h"

namespace lode {

namespace {

class GpuTopK final : public GpuBestKeys {
 public:
  GpuTopK(const Spec& spec, const GpuGeometry& geometry, Amount k, bool per_kv_head)
      : GpuBestKeys(spec, geometry, k, per_kv_head ? Ranked::group : Ranked::query_head) {}

  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    return std::ssize(heads) * far_keys(dense_, of.position) * geometry_.key_row_bytes;
  }

 private:
  void score(int, const cuda::Queries& queries, float* scores, cuda::ExponentialSum* sums,
             cuda::StreamHandle stream) override {
    cuda::score_keys(queries, dense_.sink, dense_.window, geometry_.max_tokens, scores, sums, stream);
  }
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_topk(const Spec& spec, const GpuGeometry& geometry) {
  if (spec.text("mass") || spec.text("by").value_or("score") != "score") return nullptr;
  return std::make_unique<GpuTopK>(spec, geometry, spec.amount("k", {100, false}),
                                   spec.text("per").value_or("query-head") == "kv-head");
}

}  // namespace lode
