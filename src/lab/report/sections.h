// SPDX-License-Identifier: Apache-2.0
// The tables and figures of one run, by what it measures.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lab/report/grid.h"
#include "lab/report/page.h"
#include "lab/report/svg.h"

namespace lode {

/// What a section writes with.
struct Section {
  const MeasurementRunner& grid;
  const Suite& suite;
  const SuiteRun& run;
  std::string provenance;  ///< the last sentence of every caption
  Page& page;
  int& figures;  ///< numbers the suite's figures

  bool shows(Show show) const;
  /// Names the figure's file and adds provenance to the caption. `told`: the picture in words, a line each.
  void figure(std::string caption, std::string svg, std::vector<std::string> told = {}) const;
  /// Likewise; of a chart without a point that can be drawn no more than that it is not measured yet.
  void figure(const std::string& caption, const LineChart& chart) const;
  void table(std::string caption, std::vector<std::string> head,
             std::vector<std::vector<std::string>> rows) const;
};

void write_eval(const Section& section);
void write_probe(const Section& section);
void write_recall(const Section& section);
void write_clusters(const Section& section);
void write_bench(const Section& section);
void write_key_query(const Section& section);
void write_drift(const Section& section);
void write_training(const Section& section);

/// A method's measured points for a chart; methods that differ in their budget alone become one line.
struct MethodPoint {
  std::string label;
  double x = 0, y = 0;
  std::optional<double> low, high;
};
std::vector<Series> series_from(const std::vector<MethodPoint>& points);

double member(const Json& row, const char* key);  ///< NaN where it holds no such number
std::string length_name(std::int64_t tokens);     ///< "16k"
/// Of a page so far, on how many questions and tasks, of how many, the means of an eval run rest, by length; only that
/// of one length if it is given. Empty where none is missing.
std::string answered_so_far(const MeasurementRunner& grid, const SuiteRun& run,
                            std::optional<std::int64_t> length = {});
std::string percent(double share, int digits = 2);

}  // namespace lode
