// SPDX-License-Identifier: Apache-2.0
// Any bytes as a file of trained centroids: refused, or directions of norm 1 (or 0) for every head.
#include "select/shared/centroids.h"

#include <cmath>

#include "fuzz/target.h"
#include "support/memory_file.h"

LODE_FUZZ_TARGET(centroids) {
  const lode::LayerGeometry geometry = {.layer = 0, .query_heads = 4, .kv_heads = 2, .head_dim = 4};
  const lode::test::MemoryFile file(input);
  const auto heads = lode::read_centroids(file.path(), geometry, false, "model");
  LODE_ASSERT(heads.size() == 2 && heads[0].size() == heads[1].size() && heads[0].size() >= 4);
  for (const std::vector<float>& head : heads) {
    for (std::size_t at = 0; at < head.size(); at += 4) {
      double sum = 0.0;
      for (std::size_t i = at; i < at + 4; ++i) sum += static_cast<double>(head[i]) * head[i];
      LODE_ASSERT(sum == 0.0 || std::abs(sum - 1.0) < 1e-3);
    }
  }
}
