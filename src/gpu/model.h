// SPDX-License-Identifier: Apache-2.0
// A model's weights on the GPU.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gpu/backend.h"
#include "gpu/shard.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/linear/linear.h"

namespace lode {

class CudaModel final : public GpuModel {
 public:
  /// What a recurrent layer has in place of q, k, v and o.
  struct Delta {
    cuda::DeviceWeight qkv, z, b, a, out;
    std::vector<cuda::DeviceWeight> joined;  ///< qkv, z, b and a, those that lie side by side as one matrix
    cuda::DeviceWeight conv, dt_bias, rate, norm;  // float32
  };
  /// What a layer with latent rows has in place of q, k and v.
  struct Latent {
    cuda::DeviceWeight q_a, q_a_norm, q_b, kv_a, kv_a_norm;
    cuda::DeviceWeight k_b, v_b;  // [Hq * kv_rank, nope], [Hq * value, kv_rank]; not in tiles
  };
  /// What a layer does with the numbers that it is given beside the stream.
  struct Inputs {
    cuda::DeviceWeight gate, out, norm;  // [width, D], [D, width], [1, D]
  };
  /// What experts that stand apart have beside their matrices.
  struct Apart {
    cuda::DeviceWeight dense_post_norm, norm, post_norm;  // [1, D]
    cuda::DeviceWeight router_norm;                       // [1, D] f32, its scale included
    cuda::DeviceWeight factors;                           // [1, E] f32
  };
  struct Layer {
    cuda::DeviceWeight attention_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, o_bias;
    cuda::DeviceWeight attention_post_norm, mlp_norm, gate, up, down, gate_bias, up_bias, down_bias;
    cuda::DeviceWeight mlp_post_norm;
    cuda::DeviceWeight attention_gate;
    Delta delta;
    Latent latent;
    cuda::DeviceWeight sinks;                                          // [1, Hq] f32, as the next four
    cuda::DeviceWeight router, router_bias, choice_bias, shared_gate;  // [E, D], [1, E] twice, [1, D]
    cuda::ExpertMatrices expert_gate, expert_up, expert_down;
    Apart apart;
    Inputs inputs;
    float factor = 1.0f;  ///< of the stream behind the layer
    bool experts() const { return expert_gate.count > 0; }
  };

  /// `share`: of several GPUs, whose config and weights these are (gpu/shard.h). `pool`: whose threads bring the
  /// weights; null: this thread.
  CudaModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit,
            const ModelShare& share = {}, ThreadPool* pool = nullptr);
  std::int64_t bytes() const override { return memory_.bytes(); }
  /// Scratch that products of many rows need to unpack the model's largest matrix; 0 without quantised ones.
  std::int64_t panel_bytes(cuda::Precision precision) const;
  /// What decides how much scratch the layers' experts need; of no experts where there are none.
  cuda::ExpertSizes expert_sizes(const ModelConfig& config) const;
  /// What of the weights lies here otherwise than in the file, for people; empty: nothing.
  const std::string& remark() const { return remark_; }

  cuda::DeviceWeight embedding, final_norm;
  cuda::DeviceWeight output;  ///< its rows alone, of several GPUs
  cuda::DeviceWeight input_embedding, input_projection, input_projection_norm;  ///< of ModelWeights
  std::vector<Layer> layers;

 private:
  /// Rows lie `stride` bytes apart in the file; 0: one behind the other.
  cuda::DeviceWeight take(const Weight& weight, std::int64_t stride = 0);
  cuda::DeviceWeight place(const Weight& weight, cuda::TileFormat format, std::int64_t stride, std::byte* at);
  cuda::DeviceWeight take_gain(const Weight& weight, bool plus_one);
  cuda::DeviceWeight take_f32(const Weight& weight);
  cuda::ExpertMatrices take_experts(const std::vector<ExpertWeights>& experts, Weight ExpertWeights::*which,
                                    Weight ExpertWeights::*bias);
  /// As float32, behind `change`; those of a shape alone become `otherwise`.
  cuda::DeviceWeight take_numbers(const Weight& weight, float otherwise,
                                  const std::function<float(float)>& change);
  cuda::DeviceWeight take_heads(const std::vector<Weight>& heads);
  Latent take_latent(const LatentWeights& weights);
  Apart take_apart(const ApartWeights& weights, const ModelConfig& config);
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
  std::int64_t expert_rows_ = 0, expert_cols_ = 0;  ///< of the largest matrix of an expert in tiles
  cuda::Buffer staged_;                             ///< blocks of a file that do not lie one behind the other
  std::int64_t used_ = 0;                           ///< bytes of memory_ given out
  std::uint64_t drawn_ = 0;                         ///< weights filled with random numbers
  std::int64_t largest_rows_ = 0, largest_cols_ = 0;  ///< of the matrices in tiles
  std::string remark_;
};

/// How keys and values of one sequence lie, but for the bytes from layer to layer.
cuda::KvLayout layout_of(const ModelConfig& config, DType type);
/// What a layer's products need of weights and plan; buffers, RoPE and where tokens stand are the caller's.
cuda::Linear::QkvArguments qkv_of(const CudaModel::Layer& layer, const ModelConfig& config);
cuda::Linear::MlpArguments mlp_of(const CudaModel::Layer& layer, const ModelConfig& config);
/// Of a layer with experts.
cuda::ExpertArguments experts_of(const CudaModel::Layer& layer, const ModelConfig& config);
/// The widest feed-forward that every token goes through.
std::int64_t widest_feed_forward(const ModelConfig& config);
/// Of decode attention of up to kMostSparseTokens tokens, whichever layer it is of.
std::int64_t attention_workspace_bytes(const ModelConfig& config);
/// How attention's output is added to the stream.
cuda::Addition attention_addition(const CudaModel::Layer& layer, const ModelConfig& config);

}  // namespace lode
