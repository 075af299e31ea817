// SPDX-License-Identifier: Apache-2.0
// Selection among small integer distances: there are few levels, so counting replaces sorting (HashAttention,
// appendix A.1).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// Which keys are near enough, by the level lambda of HashAttention's equations 9 to 11, told as a distance.
struct NearRule {
  enum class Mode {
    count,    ///< num-based: the `budget` nearest
    depth,    ///< depth-based: all within `depth` of the nearest
    combined  ///< within both: equation 11
  };
  Mode mode = Mode::count;
  std::int64_t budget = 0;  ///< keys; not used by depth
  std::int64_t depth = 0;   ///< levels; not used by count
  bool all_ties = false;    ///< every key of the last level, although that exceeds the budget
};

/// rows := offset + i of the keys that the rule takes, rising. Without all_ties exactly
/// min(budget, n) for count, and of the last level the newest keys, those with the largest i.
void select_near(std::span<const std::uint16_t> distance, const NearRule& rule, Position offset,
                 std::vector<Position>& rows);

}  // namespace lode
