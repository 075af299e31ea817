// SPDX-License-Identifier: Apache-2.0
// Methods that score every far key and take the best by count, per query head or per KV head, on the GPU.
#pragma once

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"

namespace lode {

class GpuBestKeys : public GpuSelector {
 public:
  /// What has a list: a query head; a group, by its heads' shares of softmax weights; or a KV head, by scores
  /// of its own.
  enum class Ranked { query_head, group, kv_head };

  void begin(const GpuStep& step) override;
  void upload(cuda::StreamHandle stream) override;
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override;
  std::int64_t counts_per_layer() const override { return counters_ * lists_; }
  int lists_per_head() const override {
    return ranked_ != Ranked::query_head ? 1 : geometry_.query_heads / geometry_.kv_heads;
  }
  std::int64_t bytes() const override;

 protected:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  /// With that many counts of every list, of which the first is how many keys it has.
  GpuBestKeys(const Spec& spec, const GpuGeometry& geometry, Amount k, Ranked ranked, int counters = 1);
  std::int32_t* counters(int layer, int which) const {
    return counts_.as<std::int32_t>() + (std::int64_t{layer} * counters_ + which) * lists_;
  }
  void clear_counters(cuda::StreamHandle stream) const {
    cuda::fill(counts_.as<void>(), 0, counts_.bytes(), stream);
  }
  /// As cuda::score_keys does; one row a KV head where these are ranked.
  virtual void score(int layer, const cuda::Queries& queries, float* scores /*[N, Hq, max_tokens]*/,
                     cuda::ExponentialSum* sums /*or null*/, cuda::StreamHandle stream) = 0;

  LocalWindow dense_;
  GpuGeometry geometry_;
  Amount k_;

 private:
  Ranked ranked_ = Ranked::query_head;
  int counters_ = 1;
  std::int64_t capacity_ = 0;
  std::int64_t lists_ = 0, used_ = 0;  ///< of most_queries, of the running step
  cuda::Buffer scores_;                // [most_queries, Hq or Hkv, max_tokens]
  cuda::Buffer sums_;                  // [most_queries, Hq, sums_of_keys(max_tokens)], of groups only
  cuda::Buffer shared_;                // [most_queries, Hkv, max_tokens], of groups only
  cuda::Buffer rows_;                  // [lists, capacity]
  cuda::Buffer counts_;                // [L, counters, lists]
  cuda::Buffer wanted_;                // [2, lists]: k, then the end of the far keys
  cuda::PinnedBuffer staged_;          // of wanted_
  cuda::Buffer workspace_;
};

}  // namespace lode
