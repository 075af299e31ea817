// SPDX-License-Identifier: Apache-2.0
// What methods that choose whole pages of consecutive keys attend of them, so that the budget is exact.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "select/shared/per_token.h"

namespace lode {

/// Adds `budget` far keys to the last set of `out`: first the newest of those behind the last whole page,
/// then whole pages by score, and of the next in rank its newest keys. Pages of `page` keys begin at
/// unit.far_begin; ties go to the newer page, a NaN counts as -inf. `pages` is scratch.
void add_best_pages(const SelectUnit& unit, std::int64_t page, std::int64_t budget,
                    std::span<const float> scores /*[far keys / page]*/, std::vector<Position>& pages,
                    Selection& out);

}  // namespace lode
