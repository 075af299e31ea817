// SPDX-License-Identifier: Apache-2.0
// What a grid has measured, as a page: a section a suite, with its tables and figures, and how each can be
// made again.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lab/report/grid.h"
#include "lab/report/page.h"
#include "lab/report/suite.h"

namespace lode {

/// Where numbers come from.
struct Provenance {
  std::string program;  ///< the command up to the suites: "lodestone report"
  std::string options;  ///< and after them: "-m models/pocket -o DIR"
  std::string commit;   ///< that the program was built from
  std::string machine, date, model;
};

Page make_report(const MeasurementRunner& grid, std::span<const Suite> suites, const Provenance& provenance);

/// The line of a chart that a method belongs to: its label without the number of its first key, which by
/// convention is the budget ("topk:k=64" -> "topk").
std::string series_of(std::string_view label);
/// That number, where the first key has one that is no share.
std::optional<double> budget_of(std::string_view label);
/// The same method looks the same in all charts.
int style_of(std::string_view label);

}  // namespace lode
