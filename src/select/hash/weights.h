// SPDX-License-Identifier: Apache-2.0
// The mapping functions of HashAttention for one model: a safetensors file with the tensors
//   layer.L.query.H.{weight,bias}.I   of query head H: phi_q, its layer I of weights [out, in] and bias [out]
//   layer.L.key.S.{weight,bias}.I     phi_kv of KV head S, or of query head S when keys is "query-head"
// and the metadata that HashScheme lists, "model_fingerprint" and "bits". Biases may be missing.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ann/hashing/hash_net.h"
#include "lodestone/selector.h"
#include "select/trained_on.h"

namespace lode {

/// What all layers of a file have in common.
struct HashScheme {
  enum class Values { off, norm, vector };
  int bits = 32;                ///< of one signature: 32, 64 or 128
  bool roped = true;            ///< q and k enter after RoPE, else before it
  bool per_query_head = false;  ///< keys have a signature for each query head (the paper), else one for each
                                ///< KV head
  Values values = Values::off;  ///< what phi_kv sees besides k: nothing, |v|, or v
  HashNet::Activation activation = HashNet::Activation::silu;

  int signatures(const LayerGeometry& geometry) const {
    return per_query_head ? geometry.query_heads : geometry.kv_heads;
  }
  std::int64_t key_inputs(int head_dim) const {
    return head_dim + (values == Values::vector ? head_dim : values == Values::norm ? 1 : 0);
  }
};

/// What phi_kv sees of the key in `row`, for each of some heads: out[h * stride + i], i < key_inputs(d).
void read_key_inputs(const HashScheme& scheme, std::span<const KvRows> heads, Position row, const Rope* rope,
                     float* out, std::int64_t stride);

/// The functions of one layer.
struct HashWeights {
  HashScheme scheme;
  std::vector<HashNet> query;  // [Hq]
  std::vector<HashNet> key;    // [S], S = Hkv or Hq
  TrainedOn trained = {};      ///< of what a file says
  /// Changes with every number: signatures are worth nothing under other functions.
  std::string fingerprint() const;
};

/// The geometry's layer. InputError when a tensor is missing, has another shape or a number that is not
/// finite, or when the file is of another kind or was trained for another model.
HashWeights read_hash_weights(const std::filesystem::path& path, const LayerGeometry& geometry,
                              std::string_view model_fingerprint);

/// What the file says of all layers; it may be of any model.
HashScheme read_hash_scheme(const std::filesystem::path& path);

/// Writes all layers, `layers[l]` of one scheme; `notes` are further metadata, for people.
void write_hash_weights(const std::filesystem::path& path, const std::vector<HashWeights>& layers,
                        std::string_view model_fingerprint, const std::map<std::string, std::string>& notes);

}  // namespace lode
