// SPDX-License-Identifier: Apache-2.0
// The weights of a model, mapped from safetensors or GGUF, checked against the config and put in the places
// of its plan.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "kernels/tiled_weight.h"
#include "kernels/weight_type.h"
#include "model/config.h"
#include "model/weight_files.h"

namespace lode {

class ThreadPool;

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

/// One expert's feed-forward.
struct ExpertWeights {
  Weight gate, up;                       // [F, D]
  Weight down;                           // [D, F]
  Weight gate_bias, up_bias, down_bias;  // data null when the plan has none
};

/// What a recurrent layer has in place of q, k, v and o.
struct DeltaWeights {
  Weight qkv;             // [channels, D]
  Weight z, b, a;         // [values, D], [value heads, D] twice
  Weight conv;            // [channels, kernel]
  Weight dt_bias, decay;  // [1, value heads]
  Weight norm;            // [1, value_dim]
  Weight out;             // [D, values]
};

/// What attention over latent rows has in place of q, k and v.
struct LatentWeights {
  Weight q_a, q_a_norm;          // [q_rank, D], [1, q_rank]; data null without a q_rank
  Weight q_b;                    // [Hq (nope + rope), q_rank or D]
  Weight kv_a, kv_a_norm;        // [kv_rank + rope, D], [1, kv_rank]
  std::vector<Weight> k_b, v_b;  // [Hq] of [kv_rank, nope] and [value, kv_rank]
};

/// What a layer does with the numbers that it is given beside the stream.
struct LayerInputWeights {
  Weight gate, out;  // [width, D], [D, width]
  Weight norm;       // [1, D]
};

/// What experts that stand apart have beside their matrices.
struct ApartWeights {
  Weight dense_post_norm, norm, post_norm, router_norm;  // [1, D]
  Weight factors;                                        // [1, E]
};

struct LayerWeights {
  Weight attention_norm;                  // [1, D]
  Weight q, k, v;                         // [Hq d, D], [Hkv d, D], [Hkv d, D]
  Weight q_bias, k_bias, v_bias, o_bias;  // data null when the model has none
  Weight q_norm, k_norm;                  // [1, d]; data null when the plan has none
  Weight o;                               // [D, Hq d]
  Weight attention_post_norm;             // [1, D]; the same
  Weight mlp_norm;                        // [1, D]
  Weight gate, up;                        // [F, D]; data null when the layer has experts alone
  Weight down;                            // [D, F]; the same
  Weight gate_bias, up_bias, down_bias;
  Weight mlp_post_norm;                                  // [1, D]; data null when the plan has none
  Weight sinks;                                          // [1, Hq]; the same
  Weight router, router_bias, choice_bias, shared_gate;  // [E, D], [1, E], [1, E], [1, D]
  std::vector<ExpertWeights> experts = {};               // [E]
  Weight attention_gate;                                 // [Hq d, D]; data null when the plan has none
  DeltaWeights delta;                                    // of recurrent layers
  LatentWeights latent;                                  // of plans with latent rows
  Weight factor;                                         // [1, 1]; data null when the plan has none
  LayerInputWeights inputs;                              // of plans with numbers for each layer
  ApartWeights apart;                                    // of plans whose experts stand apart
};

class ModelWeights {
 public:
  /// Every tensor's name, type and shape is checked against the config before any is used. InputError names
  /// file, tensor, expected and found; a Git LFS pointer or a pickle file is named as such. `check_finite`
  /// also reads all weights for NaN and infinities, by all threads of `pool` where there is one. Tensors stay
  /// where they are mapped, but for rows of q and k that a file has in another order than Rope turns them.
  static ModelWeights read(WeightFiles&& files, const ModelConfig& config, bool check_finite = true,
                           ThreadPool* pool = nullptr);
  /// Those of a folder.
  static ModelWeights read(const std::filesystem::path& model_dir, const ModelConfig& config,
                           bool check_finite = true);
  /// Seeded random weights of the config's shape, for benchmarks.
  static ModelWeights random(const ModelConfig& config, DType type, std::uint64_t seed);

  /// Shapes without data, for weights that are made elsewhere.
  static ModelWeights shapes(const ModelConfig& config, WeightType type);

  Weight embedding;  // [V, D]
  std::vector<LayerWeights> layers;
  Weight final_norm;  // [1, D]
  Weight output;      // [V, D]; the embedding when tied
  // Of plans with numbers for each layer:
  Weight input_embedding, input_projection;   // [V, L width], [L width, D]
  Weight input_projection_norm;               // [1, width]
  std::int64_t bytes = 0;                     ///< of all tensors
  std::map<std::string, std::int64_t> types;  ///< tensors in the files of each type, by its name there
  std::string fingerprint;  ///< XXH3-128 over names, shapes, types and sampled bytes, in hex

 private:
  std::vector<MappedFile> files_;
  std::vector<std::unique_ptr<std::byte[]>> owned_;
};

}  // namespace lode
