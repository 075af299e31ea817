// SPDX-License-Identifier: Apache-2.0
// What a ranking suite has measured of each method at each of its budgets.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lab/report/grid.h"

namespace lode {

// Budgets at which methods are compared, as shares of full attention's bytes.
inline constexpr double kSmall = 0.05, kMiddle = 0.10, kLarge = 0.20;
inline constexpr double kPass = 0.9;  ///< of full attention's score, or of what far context is worth

/// Values by density.
using Points = std::vector<std::pair<double, double>>;

/// y at x through points of rising x, linear in log x; nothing outside of them. Of points with equal x the
/// best counts.
std::optional<double> value_at(Points points, double x, bool more_is_better);

/// Of what full attention reads for a token of a context.
struct IndexShares {
  double held = 0;    ///< all that the index holds, the queries that it keeps as well
  double update = 0;  ///< what a new key adds to it
};
IndexShares index_shares(const Spec& spec, const ModelConfig& config, std::int64_t tokens,
                         std::int64_t kv_bytes);

/// A method at one budget, in the probe; NaN where the probe does not tell.
struct LadderStep {
  std::string label;  ///< the suite's spec
  double density = 0, recovered = 0, error = 0, selector = 0, far_keys = 0;
};

/// A method at all of its budgets.
struct Ladder {
  std::string label;  ///< without the budget
  IndexShares index = {};
  std::vector<LadderStep> steps = {};
  std::map<std::string, Points> scores = {};  ///< by column (task, length and protocol)
  Points asked_selector = {};                 ///< bytes read to choose, under questions

  /// A value of the probe at a density.
  std::optional<double> at(double density, double LadderStep::*value) const;
  std::optional<double> score_at(double density, const std::string& column) const;
  /// Bytes read to choose at a density: the probe's, or without a probe those under questions.
  std::optional<double> selector_at(double density) const;
  /// The least and the most that it reads, in the probe or, without one, under questions; the first is above
  /// the second where it was not measured.
  std::pair<double, double> reach() const;
};

struct Ladders {
  std::vector<Ladder> methods;         ///< the best first
  std::vector<std::string> columns;    ///< of scores
  std::map<std::string, double> full;  ///< full attention's score by column
};

/// From the suite's probe runs and its eval runs.
Ladders read_ladders(const MeasurementRunner& grid, const Suite& suite);

/// Whether a column's tasks hide one fact: one right key of each head suffices, so they tell only who fails.
bool is_pass_mark(const std::string& column);
/// The score from which such a column counts as passed.
double pass_mark(const Ladders& ladders, const std::string& column);

}  // namespace lode
