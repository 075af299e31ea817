// SPDX-License-Identifier: Apache-2.0
// Keys and queries of single heads while a model reads texts: what studies of how they lie look at.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "lab/train/capture.h"

namespace lode {

/// Of one layer: the keys of its first KV head and the queries of its first query head, in the order of the
/// tokens.
struct HeadVectors {
  int layer = 0;
  std::vector<float> keys, queries;              // [S, d] after RoPE
  std::vector<float> plain_keys, plain_queries;  // [S, d] before it
};

/// The first layer, the middle one and the last.
std::vector<int> usual_layers(const Model& model);

/// Of these layers; the model reads the text's first `tokens` tokens, or all (0).
std::vector<HeadVectors> read_head_vectors(Capture& capture, const Model& model, std::string_view text,
                                           const std::vector<int>& layers, std::int64_t tokens = 0);

}  // namespace lode
