// SPDX-License-Identifier: Apache-2.0
// The weights of a Llama-family model, mapped from safetensors (one file or shards), checked against the
// config.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "kernels/tiled_weight.h"
#include "kernels/weight_type.h"
#include "model/config.h"

namespace lode {

/// A weight matrix or vector in place in the mapped file.
struct Weight {
  const std::byte* data = nullptr;
  WeightType type = WeightType::f32;
  std::int64_t rows = 0, cols = 0;  ///< [out, in] of a projection; a vector is [1, n]
  /// Of a block-quantised matrix of a model: the CPU's own form of it.
  std::shared_ptr<LazyTiles> tiles = nullptr;
};

/// Bytes that a weight's numbers take in its file.
inline std::int64_t bytes_of(const Weight& w) {
  return w.data == nullptr ? 0 : bytes_of(w.type, w.rows * w.cols);
}

struct LayerWeights {
  Weight attention_norm;                  // [1, D]
  Weight q, k, v;                         // [Hq d, D], [Hkv d, D], [Hkv d, D]
  Weight q_bias, k_bias, v_bias, o_bias;  // data null when the model has none
  Weight o;                               // [D, Hq d]
  Weight mlp_norm;                        // [1, D]
  Weight gate, up;                        // [F, D]
  Weight down;                            // [D, F]
  Weight gate_bias, up_bias, down_bias;
};

class ModelWeights {
 public:
  /// Maps DIR/model.safetensors or the shards of DIR/model.safetensors.index.json; every tensor's name, type
  /// and shape is checked against the config before any is used. InputError names file, tensor, expected and
  /// found; a Git LFS pointer or a pickle file is named as such. `check_finite` also reads all weights for
  /// NaN and infinities.
  static ModelWeights read(const std::filesystem::path& model_dir, const ModelConfig& config,
                           bool check_finite = true);
  /// Seeded random weights of the config's shape, for benchmarks.
  static ModelWeights random(const ModelConfig& config, DType type, std::uint64_t seed);

  /// Shapes without data, for weights that are made elsewhere.
  static ModelWeights shapes(const ModelConfig& config, DType type);

  Weight embedding;  // [V, D]
  std::vector<LayerWeights> layers;
  Weight final_norm;        // [1, D]
  Weight output;            // [V, D]; the embedding when tied
  std::int64_t bytes = 0;   ///< of all tensors
  std::string fingerprint;  ///< XXH3-128 over names, shapes, types and sampled bytes, in hex

 private:
  std::vector<MappedFile> files_;
  std::unique_ptr<std::byte[]> owned_;
};

}  // namespace lode
