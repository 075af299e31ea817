// SPDX-License-Identifier: Apache-2.0
// All methods of a suite in one table, at equal bytes.
#pragma once

#include "lab/report/ladders.h"
#include "lab/report/sections.h"

namespace lode {

/// The table, and in words why its order is so. A method's values at a density are interpolated between its
/// own measured points, and left out where its points do not reach.
void write_ranking(const Section& section, const Ladders& ladders);

}  // namespace lode
