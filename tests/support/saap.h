// SPDX-License-Identifier: Apache-2.0
// Artefacts of saap with random networks, for the layer that World::geometry names.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "select/saap/artefact.h"

namespace lode::test {

inline std::vector<float> random_floats(std::int64_t count, std::uint64_t seed, double scale) {
  Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& value : x) value = static_cast<float>(scale * rng.normal());
  return x;
}

/// What a random artefact is made of, as float32.
struct SaapShape {
  int kv_heads = 2, d = 64, clusters = 24, hidden = 32;
  DType type = DType::f32;
  bool linear = false, key_bias = false, key_net = false;
};

inline SaapHead random_saap_head(const SaapShape& s, std::uint64_t seed) {
  const auto floats = [&](std::int64_t count, std::uint64_t at, double scale) {
    return random_floats(count, hash_seed(seed, at), scale);
  };
  const auto wide = 1.0 / std::sqrt(static_cast<double>(s.d)),
             deep = 1.0 / std::sqrt(static_cast<double>(s.hidden));
  const auto centroids = floats(s.clusters * s.d, 1, wide), key_bias = floats(s.clusters, 2, 0.2);
  const auto w1 = floats(s.hidden * s.d, 3, wide), b1 = floats(s.hidden, 4, 0.3);
  const auto w2 = floats(s.clusters * s.hidden, 5, 2 * deep), b2 = floats(s.clusters, 6, 0.3);
  const auto w3 = floats(s.clusters * s.d, 7, wide);
  BucketNet::Weights keys = {
      .hidden_weight = {}, .hidden_bias = {}, .output_weight = {}, .linear_weight = centroids, .bias = {}};
  if (s.key_net) keys = {w1, b1, w2, {}, {}};
  if (s.key_bias) keys.bias = key_bias;
  BucketNet::Weights queries = {w1, b1, w2, {}, b2};
  if (s.linear) queries.linear_weight = w3;
  return {
      .keys = BucketNet(s.d, s.clusters, keys, DType::f32),
      .networks = {{.queries = BucketNet(s.d, s.clusters, queries, s.type), .selectivity = {1.0f}}},
      .load = std::vector<float>(static_cast<std::size_t>(s.clusters), 1.0f / static_cast<float>(s.clusters)),
      .imbalance = 1.0f};
}

/// A head with networks for contexts of growing length, over the buckets of the first.
inline SaapHead random_saap_head_of(int networks, const SaapShape& s, std::uint64_t seed) {
  SaapHead head = random_saap_head(s, seed);
  for (int k = 1; k < networks; ++k)
    head.networks.push_back(random_saap_head(s, hash_seed(seed, k)).networks.front());
  return head;
}

/// Files of random artefacts, removed at the end of the program.
class SaapFiles {
 public:
  static std::string of(const SaapShape& shape, const char* fingerprint = "model") {
    static SaapFiles files;
    const std::string name = std::to_string(shape.kv_heads) + "-" + std::to_string(shape.d) + "-" +
                             std::to_string(shape.clusters) + "-" + std::string(name_of(shape.type)) +
                             (shape.linear ? "l" : "") + (shape.key_bias ? "b" : "") +
                             (shape.key_net ? "n" : "") + fingerprint;
    const auto [at, fresh] = files.paths_.try_emplace(
        name, std::filesystem::temp_directory_path() /
                  ("saap-" + std::to_string(getpid()) + "-" + name + ".safetensors"));
    if (fresh) {
      std::vector<SaapHead> heads;
      for (int h = 0; h < shape.kv_heads; ++h)
        heads.push_back(random_saap_head(shape, static_cast<std::uint64_t>(h)));
      write_saap(at->second, {{3, heads}}, fingerprint, {{.from = 0, .training = "{}"}});
    }
    return at->second.string();
  }
  ~SaapFiles() {
    for (const auto& [name, path] : paths_) std::filesystem::remove(path);
  }

 private:
  std::map<std::string, std::filesystem::path> paths_;
};

}  // namespace lode::test
