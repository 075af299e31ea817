// SPDX-License-Identifier: Apache-2.0
// Looks into sparse attention calls and compares each head with full attention of the same queries.
#pragma once

#include <cstdint>
#include <vector>

#include "lab/eval/error_bound.h"
#include "lab/eval/probe.h"
#include "model/llama.h"

namespace lode {

class HeadProbe {
 public:
  /// Looks at query tokens of these positions, which rise. errors_alone: see ProbeOptions.
  HeadProbe(int layers, int query_heads, std::int64_t top, std::vector<Position> positions,
            bool errors_alone = false);
  /// Hooks to give to a context; valid as long as this object.
  ForwardHooks hooks();
  /// Means per head of what was seen; layers that were dense are left out.
  std::vector<HeadMeasure> measures() const;

 private:
  struct Sums {
    double density = 0, read = 0, recall = 0, mass = 0, error = 0, bound = 0;
    std::int64_t queries = 0;
  };
  void look(const LayerGeometry& geometry, const QueryBlock& block, const Selection& selection,
            const float* output);
  /// Sums of the group's heads for one query token and KV head, [G]; exact: the token's full output [Hq, d].
  std::vector<Sums> compare(const LayerGeometry& geometry, const QueryBlock& block,
                            const Selection& selection, const float* output, const float* exact,
                            std::int64_t token, int kv_head) const;
  /// What needs a query's scores: recall, mass and bound. q: [d]; scores, attended: [keys]; far: [begin, end) of the
  /// far keys.
  void add_score_measures(const LayerGeometry& geometry, int kv_head, std::span<const float> q,
                          std::span<const float> scores, const std::vector<char>& attended,
                          std::pair<Position, Position> far, std::span<const float> output, Sums& sums) const;

  int query_heads_;
  std::int64_t top_;
  std::vector<Position> positions_;
  bool errors_alone_;
  std::vector<Sums> sums_;          // [L, Hq]
  std::vector<ErrorBound> bounds_;  // [L, Hkv], grown as keys come
};

}  // namespace lode
