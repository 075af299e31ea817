// SPDX-License-Identifier: Apache-2.0
// All methods of a suite in one table, at equal bytes.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "lab/report/sections.h"

namespace lode {

/// Reads the suite's probe run and its eval runs. A method's values at a density are interpolated between its
/// own measured points, and left out where its points do not reach.
void write_ranking(const Section& section);

/// Of what full attention reads for a token of a context.
struct IndexShares {
  double held = 0;    ///< all that the index holds, the queries that it keeps as well
  double update = 0;  ///< what a new key adds to it
};
IndexShares index_shares(const Spec& spec, const ModelConfig& config, std::int64_t tokens,
                         std::int64_t kv_bytes);

/// y at x through points of rising x, linear in log x; nothing outside of them. Of points with equal x the
/// best counts.
std::optional<double> value_at(std::vector<std::pair<double, double>> points, double x, bool more_is_better);

}  // namespace lode
