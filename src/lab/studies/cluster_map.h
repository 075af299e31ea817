// SPDX-License-Identifier: Apache-2.0
// The clusters that a method makes of a head's keys, laid out flat: Squeezed Attention's figure A.1, by
// principal axes in place of t-SNE, so that distances mean something and a picture comes out the same again.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "lab/eval/eval.h"
#include "lodestone/engine.h"

namespace lode {

struct ClusterMapOptions {
  ContextOptions context;
  std::vector<int> layers;     ///< empty: the first, the middle and the last
  int kv_head = 0;             ///< of each layer
  std::int64_t clusters = 10;  ///< those with the most keys
  std::int64_t keys = 60;      ///< most of one that are shown, evenly spread over it
};

/// {"attention", "layer", "kv_head", "clusters", "shown": share of the spread that the two axes hold,
/// "groups": [{"keys", "points": [[x, y], ...]}]}, by method and layer. InputError for methods without
/// clusters, and for texts too short to have any.
std::vector<Json> cluster_maps(const std::shared_ptr<const Model>& model, std::string_view text,
                               const std::vector<NamedSpec>& specs, const ClusterMapOptions& options);

/// The axis of the largest spread of rows [n, d] around 0, of length 1; the rows lose their part along it.
/// Returns the spread, the sum of squares that they lose.
double take_main_axis(std::vector<float>& rows, std::int64_t d, std::vector<float>& along /*[n]*/);

}  // namespace lode
