// SPDX-License-Identifier: Apache-2.0
// Any bytes as an artefact of saap: refused, or networks that label a key and score a query.
#include <array>
#include <cmath>

#include "fuzz/target.h"
#include "select/saap/artefact.h"
#include "support/memory_file.h"

LODE_FUZZ_TARGET(saap) {
  const lode::LayerGeometry geometry = {.layer = 0, .query_heads = 2, .kv_heads = 1, .head_dim = 2};
  const lode::test::MemoryFile file(input);
  const lode::SaapLayer layer = lode::read_saap(file.path(), geometry, "model");
  LODE_ASSERT(layer.heads.size() == 1 && layer.buckets() >= 1);
  const lode::SaapHead& head = layer.heads[0];
  const std::array<float, 4> x = {1.0f, -2.0f, 0.0f, 3e38f};
  std::array<std::int32_t, 2> labels = {};
  head.keys.label({x.data(), 2, 2}, labels);
  for (const std::int32_t label : labels) LODE_ASSERT(label >= 0 && label < layer.buckets());
  std::vector<float> scratch, scores(static_cast<std::size_t>(2 * layer.buckets()));
  for (const lode::SaapNetwork& network : head.networks) {
    network.queries.scores(x.data(), 2, scratch, scores.data());
    for (const std::int64_t probes : {1, 3, 1 << 20})
      LODE_ASSERT(std::isfinite(network.expected_selectivity(probes)));
  }
  for (const lode::Position query : {0, 1 << 20})
    LODE_ASSERT(layer.network_for(query) < head.networks.size());
}
