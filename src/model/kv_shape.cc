// SPDX-License-Identifier: Apache-2.0
#include "model/kv_shape.h"

namespace lode {

KvShape kv_shape(const ModelConfig& c, DType type, std::int64_t max_tokens) {
  KvShape shape = {.layers = c.layers,
                   .kv_heads = c.most_kv_heads(),
                   .head_dim = c.head_dim,
                   .type = type,
                   .max_tokens = max_tokens,
                   .recurrent = c.plan.recurrent_floats(),
                   .shared_rows = c.plan.latent.kv_rank > 0};
  bool alike = true;
  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerPlan plan = c.plan.layer(layer);
    const KvLayerShape own = {.kv_heads = c.kv_heads_of(layer),
                              .head_dim = c.head_dim_of(layer),
                              .rows_of = plan.own_rows() ? layer : plan.rows_of};
    alike = alike && own == KvLayerShape{c.kv_heads, c.head_dim, layer};
    shape.by_layer.push_back(own);
  }
  if (alike) shape.by_layer.clear();
  return shape;
}

}  // namespace lode
