// SPDX-License-Identifier: Apache-2.0
// Untrained functions of HashAttention for a layer, for tests of what does not depend on training.
#pragma once

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "select/hash/weights.h"

namespace lode::test {

/// in -> widths... -> bits, normal weights and biases.
inline HashNet random_net(std::int64_t in, std::vector<std::int64_t> widths, const HashScheme& scheme,
                          std::uint64_t seed) {
  Rng rng(seed);
  widths.push_back(scheme.bits);
  std::vector<HashLayer> layers;
  for (const std::int64_t out : widths) {
    std::vector<float> w(static_cast<std::size_t>(in * out)), bias(static_cast<std::size_t>(out));
    for (float& x : w) x = static_cast<float>(rng.normal() / std::sqrt(static_cast<double>(in)));
    for (float& x : bias) x = static_cast<float>(rng.normal() * 0.1);
    const auto bytes = std::as_bytes(std::span(w));
    layers.push_back({.in = in,
                      .out = out,
                      .type = DType::f32,
                      .weight = {bytes.begin(), bytes.end()},
                      .bias = std::move(bias)});
    in = out;
  }
  return {std::move(layers), scheme.activation};
}

inline HashWeights random_hash_weights(const LayerGeometry& geometry, const HashScheme& scheme,
                                       std::uint64_t seed = 1) {
  HashWeights weights = {.scheme = scheme, .query = {}, .key = {}};
  for (int h = 0; h < geometry.query_heads; ++h)
    weights.query.push_back(random_net(geometry.head_dim, {24}, scheme, hash_seed(seed, 1, h)));
  for (int s = 0; s < scheme.signatures(geometry); ++s) {
    weights.key.push_back(
        random_net(scheme.key_inputs(geometry.head_dim), {24, 20}, scheme, hash_seed(seed, 2, s)));
  }
  return weights;
}

/// A file of these functions for the geometry's layer and the ones before it.
inline std::filesystem::path write_hash_file(const LayerGeometry& geometry, const HashScheme& scheme,
                                             std::uint64_t seed = 1) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("lodestone-hash-" + std::to_string(getpid()) + ".safetensors");
  write_hash_weights(
      path,
      std::vector(static_cast<std::size_t>(geometry.layer + 1), random_hash_weights(geometry, scheme, seed)),
      "model", {});
  return path;
}

}  // namespace lode::test
