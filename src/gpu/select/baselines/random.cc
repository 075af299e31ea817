// SPDX-License-Identifier: Apache-2.0
// random on the GPU: every far key has the number that the host's generator gives it, the largest are taken.
#include "kernels/cuda/device/random.h"

#include "base/rng.h"
#include "gpu/select/best_keys.h"

namespace lode {

namespace {

class GpuRandom final : public GpuBestKeys {
 public:
  GpuRandom(const Spec& spec, const GpuGeometry& geometry)
      : GpuBestKeys(spec, geometry, spec.amount("fraction", {0.05, true}), Ranked::kv_head) {}

  std::int64_t select_bytes(const CountedToken&, std::span<const int>, std::int64_t) const override {
    return 0;
  }

 private:
  void score(int layer, const cuda::Queries& queries, float* scores, cuda::ExponentialSum*,
             cuda::StreamHandle stream) override {
    cuda::draw_numbers(queries, hash_seed(geometry_.seed, geometry_.first_layer + layer), dense_.sink,
                       dense_.window, geometry_.max_tokens, scores, stream);
  }
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_random(const Spec& spec, const GpuGeometry& geometry) {
  return std::make_unique<GpuRandom>(spec, geometry);
}

}  // namespace lode
