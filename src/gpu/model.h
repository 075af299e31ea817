// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU.
#pragma once

#include <vector>

#include "gpu/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/linear.h"

namespace lode {

class CudaModel final : public GpuModel {
 public:
  struct Layer {
    cuda::DeviceWeight attention_norm, q, k, v, q_bias, k_bias, v_bias, o, o_bias;
    cuda::DeviceWeight mlp_norm, gate, up, down, gate_bias, up_bias, down_bias;
  };

  CudaModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit);
  std::int64_t bytes() const override { return memory_.bytes(); }

  cuda::DeviceWeight embedding, final_norm, output;
  std::vector<Layer> layers;

 private:
  cuda::DeviceWeight take(const Weight& weight, bool norm);

  cuda::Buffer memory_;
  std::int64_t used_ = 0;    ///< bytes of memory_ given out
  std::uint64_t drawn_ = 0;  ///< weights filled with random numbers
};

}  // namespace lode
