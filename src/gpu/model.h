// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU.
#pragma once

#include <string>
#include <vector>

#include "gpu/backend.h"
#include "gpu/shard.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/linear.h"

namespace lode {

class CudaModel final : public GpuModel {
 public:
  /// What a recurrent layer has in place of q, k, v and o.
  struct Delta {
    cuda::DeviceWeight qkv, z, b, a, out;
    cuda::DeviceWeight together;                   ///< qkv, z, b and a, where they are one matrix; or none
    cuda::DeviceWeight conv, dt_bias, rate, norm;  // float32
  };
  struct Layer {
    cuda::DeviceWeight attention_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, o_bias;
    cuda::DeviceWeight attention_post_norm, mlp_norm, gate, up, down, gate_bias, up_bias, down_bias;
    cuda::DeviceWeight mlp_post_norm;
    cuda::DeviceWeight attention_gate;
    Delta delta;
  };

  /// `share`: of several GPUs, whose config and weights these are (gpu/shard.h). `pool`: whose threads bring the
  /// weights; null: this thread.
  CudaModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit,
            const ModelShare& share = {}, ThreadPool* pool = nullptr);
  std::int64_t bytes() const override { return memory_.bytes(); }
  /// Scratch that products of many rows need to unpack the model's largest matrix; 0 without quantised ones.
  std::int64_t panel_bytes(cuda::Precision precision) const;
  /// What of the weights lies here otherwise than in the file, for people; empty: nothing.
  const std::string& remark() const { return remark_; }

  cuda::DeviceWeight embedding, final_norm;
  cuda::DeviceWeight output;  ///< its rows alone, of several GPUs
  std::vector<Layer> layers;

 private:
  /// Rows lie `stride` bytes apart in the file; 0: one behind the other.
  cuda::DeviceWeight take(const Weight& weight, std::int64_t stride = 0);
  cuda::DeviceWeight take_gain(const Weight& weight, bool plus_one);
  /// As float32, behind `change`; those of a shape alone become `otherwise`.
  cuda::DeviceWeight take_numbers(const Weight& weight, float otherwise, float (*change)(float));
  Delta take_delta(const DeltaWeights& weights, bool decay_log);
  void take_tiles(const Weight& weight, cuda::TileFormat format, std::int64_t stride, std::byte* to);
  void take_widened(const Weight& weight, std::int64_t stride, std::byte* to);
  void bring_pieces(ThreadPool* pool);

  cuda::Buffer memory_;
  // While weights are taken:
  cuda::StreamHandle stream_ = nullptr;
  /// Rows of a file that come as they lie there: at most PinnedUpload::kPieceBytes.
  struct Piece {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::int64_t bytes = 0, rows = 0, cols = 0;
    cuda::TileFormat format = cuda::TileFormat::none;  ///< to be packed so
  };
  std::vector<Piece> pieces_;
  cuda::Buffer staged_;      ///< blocks of a file that do not lie one behind the other
  std::int64_t used_ = 0;    ///< bytes of memory_ given out
  std::uint64_t drawn_ = 0;  ///< weights filled with random numbers
  std::int64_t largest_rows_ = 0, largest_cols_ = 0;  ///< of the matrices in tiles
  std::string remark_;
};

/// What a layer's products need of weights and plan; buffers, RoPE and where tokens stand are the caller's.
cuda::Linear::QkvArguments qkv_of(const CudaModel::Layer& layer, const ModelConfig& config);
cuda::Linear::MlpArguments mlp_of(const CudaModel::Layer& layer, const ModelConfig& config);
/// How attention's output is added to the stream.
cuda::Addition attention_addition(const CudaModel::Layer& layer, const ModelConfig& config);

}  // namespace lode
