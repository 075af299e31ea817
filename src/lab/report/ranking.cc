// SPDX-License-Identifier: Apache-2.0
#include "lab/report/ranking.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "lab/report/explanation.h"

namespace lode {

namespace {

std::string cell(const std::optional<double>& value, const char* format) {
  const double x = value.value_or(std::nan(""));
  return std::isfinite(x) ? fmt::format(fmt::runtime(format), x) : std::string("-");
}

std::vector<std::string> head_of(const Ladders& ladders) {
  std::vector<std::string> head = {"attention", "place"};
  for (const double budget : {kSmall, kMiddle, kLarge})
    head.push_back("recovered gap at " + percent(budget, 0));
  head.emplace_back("output error");
  head.insert(head.end(), ladders.columns.begin(), ladders.columns.end());
  for (const char* name :
       {"bytes measured", "exact bytes", "selector bytes", "update bytes", "index, of K and V"})
    head.emplace_back(name);
  return head;
}

std::vector<std::string> row_of_full(const Ladders& ladders) {
  std::vector<std::string> row = {"`full`", "", "1.000", "1.000", "1.000", "0.000"};
  for (const std::string& column : ladders.columns) row.push_back(cell(ladders.full.at(column), "{:.1f}"));
  row.insert(row.end(), {"100 %", "100 %", "0 %", "0 %", "0 %"});
  return row;
}

std::vector<std::string> row_of(const Ladders& ladders, const Ladder& l, const std::string& place) {
  std::vector<std::string> row = {"`" + l.label + "`", place};
  for (const double budget : {kSmall, kMiddle, kLarge})
    row.push_back(cell(l.at(budget, &LadderStep::recovered), "{:.3f}"));
  row.push_back(cell(l.at(kMiddle, &LadderStep::error), "{:.3f}"));
  for (const std::string& column : ladders.columns) {
    const std::optional<double> score = l.score_at(kMiddle, column);
    const bool passes = is_pass_mark(column) && score.value_or(0) >= pass_mark(ladders, column);
    row.push_back(passes ? "pass" : cell(score, "{:.1f}"));
  }
  const auto [low, high] = l.reach();
  row.push_back(low > high           ? "-"
                : high < 1.001 * low ? percent(low, 1)
                                     : fmt::format("{:.1f} to {}", 100 * low, percent(high, 1)));
  const auto selector = l.selector_at(kMiddle);
  row.push_back(selector ? percent(kMiddle - *selector, 1) : "-");
  row.push_back(selector ? percent(*selector, 1) : "-");
  row.push_back(percent(l.index.update, 4));
  row.push_back(percent(l.index.held, 0));
  return row;
}

void write_table(const Section& section, const Ladders& ladders) {
  std::vector<std::vector<std::string>> rows = {row_of_full(ladders)};
  int place = 0;
  for (const Ladder& l : ladders.methods) {
    const bool ranked = l.at(kMiddle, &LadderStep::recovered).has_value();
    rows.push_back(row_of(ladders, l, ranked ? std::to_string(++place) : "-"));
  }
  section.table(
      fmt::format("All methods at equal bytes, by the recovered gap at {0} of full attention's. Output "
                  "error and scores at {0} too; exact and selector bytes are what these {0} are made of.",
                  percent(kMiddle, 0)),
      head_of(ladders), std::move(rows));
}

/// Of a page so far: what of the suite is there.
std::string so_far_of(const Section& section) {
  if (!section.grid.so_far()) return {};
  std::vector<std::string> sentences;
  std::size_t there = 0, all = 0;
  for (const SuiteRun& run : section.suite.runs) {
    if (run.kind == RunKind::probe) {
      const std::vector<Json> rows = section.grid.probe(run, run.lengths.back());
      all += rows.size();
      there += static_cast<std::size_t>(
          std::count_if(rows.begin(), rows.end(), [](const Json& row) { return !row.is_null(); }));
    }
    if (run.kind != RunKind::eval) continue;
    const std::string answered = answered_so_far(section.grid, run);
    if (!answered.empty()) sentences.push_back(fmt::format("Tasks {}. {}", join(run.tasks), answered));
  }
  if (there < all)
    sentences.insert(sentences.begin(),
                     fmt::format("So far the probe has measured {} of {}.", there, counted(all, "spec")));
  return join(sentences, " ");
}

}  // namespace

void write_ranking(const Section& section, const Ladders& ladders) {
  if (ladders.methods.empty())
    return section.page.paragraph(
        std::string("All methods at equal bytes: ") +
        (section.grid.so_far() ? "not measured yet." : "none that could be measured."));
  section.page.paragraph(
      "Every method is measured at several budgets. Its values at equal bytes lie between its own two "
      "nearest "
      "points, linear in the logarithm of the bytes, and a dash stands where its points do not reach. Bytes "
      "are those of the chosen keys and values, of sink and window (exact bytes), and those read to choose "
      "them (selector bytes). Update bytes are written to keep an index up to date, as many as a new "
      "key adds to it, over what full attention reads for that token; they are so few that they are left out "
      "of the order. \"pass\": at least 90 % of full attention's score.");
  section.page.paragraph(so_far_of(section));
  write_table(section, ladders);
  section.page.paragraph("What these rows say of the order:");
  section.page.list(explanation_of(ladders));
}

}  // namespace lode
