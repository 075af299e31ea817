// SPDX-License-Identifier: Apache-2.0
#include "select/shared/estimated_keys.h"

#include "select/shared/best_keys.h"
#include "select/shared/softmax_sum.h"

namespace lode {

void scale_queries(const SelectUnit& unit, const LayerGeometry& geometry, std::vector<float>& q) {
  const std::span<const float> plain = unit.group_of(unit.block->q, geometry);
  q.assign(plain.begin(), plain.end());
  for (float& x : q) x *= geometry.scale;
}

void add_all_keys(const SelectUnit& unit, const LayerGeometry& geometry, Selection& out) {
  out.add_set(unit.set(all_heads(geometry.group())));
  out.add_run(unit.far_begin, unit.far_end);
}

void add_best_keys(const SelectUnit& unit, const LayerGeometry& geometry, Matrix<float> scores,
                   bool per_kv_head, std::int64_t budget, std::vector<Position>& rows, Selection& out) {
  if (per_kv_head) sum_softmax(scores);
  for (int g = 0; g < (per_kv_head ? 1 : geometry.group()); ++g) {
    out.add_set(unit.set(per_kv_head ? all_heads(geometry.group()) : 1u << g));
    top_count(scores[g], budget, unit.far_begin, rows);
    out.add_rows(rows);
  }
}

}  // namespace lode
