// SPDX-License-Identifier: Apache-2.0
// streaming on the GPU: sink and window, and no far key.
#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"

namespace lode {

namespace {

class GpuStreaming final : public GpuSelector {
 public:
  GpuStreaming(const Spec& spec, const GpuGeometry& geometry)
      : dense_(spec.dense),
        lists_(std::int64_t{geometry.most_queries} * geometry.kv_heads),
        counts_(geometry.layers * lists_ * 4, "the counts of streaming") {
    cuda::fill(counts_.as<void>(), 0, counts_.bytes(), geometry.stream);
  }
  void begin(const GpuStep&) override {}
  void upload(cuda::StreamHandle) override {}
  bool has_news() const override { return false; }
  cuda::RowLists select(int, const cuda::Queries&, const float*, cuda::StreamHandle) override {
    return {.rows = counts_.as<std::int32_t>(),
            .counts = counts_.as<std::int32_t>(),
            .capacity = 1,
            .lists_per_head = 1,
            .sink = dense_.sink,
            .window = dense_.window};
  }
  std::int64_t counts_per_layer() const override { return lists_; }
  int lists_per_head() const override { return 1; }
  std::int64_t select_bytes(const CountedToken&, std::span<const int>, std::int64_t) const override {
    return 0;
  }
  std::int64_t bytes() const override { return counts_.bytes(); }

 private:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  LocalWindow dense_;
  std::int64_t lists_ = 0;
  cuda::Buffer counts_;  // [L, most_queries, Hkv] of zero
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_streaming(const Spec& spec, const GpuGeometry& geometry) {
  return std::make_unique<GpuStreaming>(spec, geometry);
}

}  // namespace lode
