// SPDX-License-Identifier: Apache-2.0
// What methods share that estimate the scores of all far keys from something small and attend those with the
// best estimates (double_sparsity.cc, pqcache.cc), or know the scores (topk.cc).
#pragma once

#include <vector>

#include "lodestone/selection.h"
#include "select/shared/per_token.h"

namespace lode {

/// The group's queries times attention's scale: [G, d].
void scale_queries(const SelectUnit& unit, const LayerGeometry& geometry, std::vector<float>& q);

/// All far keys, for the whole group.
void add_all_keys(const SelectUnit& unit, const LayerGeometry& geometry, Selection& out);

/// The `budget` keys with the best scores [G, far keys], of each head by itself, or of the group by the sums
/// of its heads' softmax weights; the scores are lost. `rows` is scratch memory.
void add_best_keys(const SelectUnit& unit, const LayerGeometry& geometry, Matrix<float> scores,
                   bool per_kv_head, std::int64_t budget, std::vector<Position>& rows, Selection& out);

}  // namespace lode
