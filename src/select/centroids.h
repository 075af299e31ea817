// SPDX-License-Identifier: Apache-2.0
// Centroids that were trained offline: a safetensors file with one tensor "layer.L.head.H.centroids" [C, d]
// per layer and KV head, and the metadata "rope" (off: trained on keys before RoPE; on: after it) and
// "model_fingerprint".
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/selector.h"

namespace lode {

/// Centroids [Hkv][C, d] of the geometry's layer, scaled to norm 1. InputError when a tensor is missing, has
/// another shape or type or a number that is not finite, when heads have different C, or when the file was
/// made for another model or RoPE.
std::vector<std::vector<float>> read_centroids(const std::filesystem::path& path,
                                               const LayerGeometry& geometry, bool roped,
                                               std::string_view model_fingerprint);

/// Writes the centroids of all layers: layers[l][h] is [C, d].
void write_centroids(const std::filesystem::path& path,
                     const std::vector<std::vector<std::vector<float>>>& layers, int head_dim, bool roped,
                     std::string_view model_fingerprint);

}  // namespace lode
