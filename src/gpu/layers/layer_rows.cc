// SPDX-License-Identifier: Apache-2.0
#include "gpu/layers/layer_rows.h"

#include <algorithm>
#include <utility>

#include "lodestone/error.h"

namespace lode {

std::vector<cuda::LayerRows> layer_rows(const ModelConfig& c) {
  const auto layers = static_cast<std::size_t>(c.layers);
  std::vector<cuda::LayerRows> rows(layers);
  int first_with_rows = 0;
  while (first_with_rows + 1 < c.layers && c.plan.layer(first_with_rows).recurrent) ++first_with_rows;
  bool alike = true;
  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerPlan plan = c.plan.layer(layer);
    cuda::LayerRows& own = rows[static_cast<std::size_t>(layer)];
    own = {.kv_heads = c.kv_heads_of(layer),
           .head_dim = c.head_dim_of(layer),
           .shows = plan.recurrent    ? first_with_rows
                    : plan.own_rows() ? layer
                                      : plan.rows_of};
    alike = alike && own == cuda::LayerRows{c.kv_heads, c.head_dim, layer};
  }
  if (alike) rows.clear();
  return rows;
}

namespace {

/// A layer of each kind; [L] of each layer its kind.
std::pair<std::vector<int>, std::vector<int>> kinds_of(const ModelConfig& c) {
  std::vector<int> kinds, of_layer;
  for (int layer = 0; layer < c.layers; ++layer) {
    const auto known = std::ranges::find_if(kinds, [&](int other) {
      return c.kv_heads_of(other) == c.kv_heads_of(layer) && c.head_dim_of(other) == c.head_dim_of(layer);
    });
    of_layer.push_back(static_cast<int>(known - kinds.begin()));
    if (known == kinds.end()) kinds.push_back(layer);
  }
  return {kinds, of_layer};
}

}  // namespace

LayerKinds::LayerKinds(const ModelConfig& config) {
  std::tie(kinds_, of_layer_) = kinds_of(config);
  LODE_ASSERT(fits(config));
}

bool LayerKinds::fits(const ModelConfig& config) {
  return std::ssize(kinds_of(config).first) <= kMost;
}

}  // namespace lode
