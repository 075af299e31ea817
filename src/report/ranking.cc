// SPDX-License-Identifier: Apache-2.0
#include "report/ranking.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "report/report.h"

namespace lode {

std::optional<double> value_at(std::vector<std::pair<double, double>> points, double x, bool more_is_better) {
  std::erase_if(points, [](const auto& p) { return !(p.first > 0) || !std::isfinite(p.second); });
  std::sort(points.begin(), points.end(), [&](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first
           : more_is_better   ? a.second > b.second
                              : a.second < b.second;
  });
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (points[i].first == x) return points[i].second;
    if (points[i].first < x) continue;
    if (i == 0) return std::nullopt;
    const auto& [x0, y0] = points[i - 1];
    const auto& [x1, y1] = points[i];
    return y0 + (y1 - y0) * std::log(x / x0) / std::log(x1 / x0);
  }
  return std::nullopt;
}

namespace {

/// What is measured of a method, as points over density.
struct Ladder {
  std::string label;
  std::vector<std::pair<double, double>> recovered, error, selector;
  /// Scores by column (task, length and protocol).
  std::map<std::string, std::vector<std::pair<double, double>>> scores;
};

constexpr double kBudgets[] = {0.05, 0.10, 0.20};

class Ranking {
 public:
  explicit Ranking(const Section& section) : s_(section) {
    for (const SuiteRun& run : s_.suite.runs) {
      if (run.kind == RunKind::probe) read_probe(run);
      if (run.kind == RunKind::eval) read_eval(run);
    }
  }

  void write() const {
    for (const double budget : kBudgets) table(budget);
  }

 private:
  Ladder& ladder(const std::string& label) {
    const std::string name = series_of(label);
    const auto found =
        std::find_if(ladders_.begin(), ladders_.end(), [&](const Ladder& l) { return l.label == name; });
    return found != ladders_.end() ? *found : ladders_.emplace_back(Ladder{.label = name});
  }

  void read_probe(const SuiteRun& run) {
    const std::vector<GridMethod> methods = s_.grid.methods(run);
    const std::vector<Json> rows = s_.grid.probe(run, run.lengths.back());
    for (std::size_t i = 0; i < methods.size(); ++i) {
      if (!rows[i].is_object() || methods[i].named.name == "full") continue;
      Ladder& l = ladder(methods[i].label);
      const double density = rows[i].at("density").get<double>();
      if (rows[i].at("recovered").is_number())
        l.recovered.emplace_back(density, rows[i].at("recovered").get<double>());
      if (json_has(rows[i], "mean"))
        l.error.emplace_back(density, rows[i].at("mean").at("error").get<double>());
    }
  }

  void read_eval(const SuiteRun& run) {
    for (const Protocol& protocol : run.protocols) {
      const EvalReport report = s_.grid.eval(run, protocol);
      for (const EvalRow& row : report.rows) {
        const std::string length =
            row.tokens > 0 ? " " + length_name(row.tokens) : "";  // unknown of a user's
        const std::string column = fmt::format("{}{} ({})", row.task, length, protocol.str());
        if (std::find(columns_.begin(), columns_.end(), column) == columns_.end()) columns_.push_back(column);
        if (row.attention == "full") {
          full_[column] = row.score;
          continue;
        }
        for (const GridMethod& m : s_.grid.methods(run)) {
          if (m.named.name != row.attention) continue;
          Ladder& l = ladder(m.label);
          l.scores[column].emplace_back(row.density, row.score);
          if (row.density > 0) l.selector.emplace_back(row.density, row.selector_share / row.density);
        }
      }
    }
  }

  void table(double budget) const {
    struct Row {
      double order = 0;  ///< recovered gap; what has none comes last
      std::vector<std::string> cells;
    };
    std::vector<Row> rows;
    const auto cell = [](const std::optional<double>& v, const char* format) {
      return v ? fmt::format(fmt::runtime(format), *v) : std::string("-");
    };
    for (const Ladder& l : ladders_) {
      const auto recovered = value_at(l.recovered, budget, true);
      const auto selector = value_at(l.selector, budget, false);
      Row row = {
          recovered.value_or(-1e9),
          {"`" + l.label + "`", cell(recovered, "{:.3f}"), cell(value_at(l.error, budget, false), "{:.3f}")}};
      bool any = recovered.has_value();
      for (const std::string& column : columns_) {
        const auto points = l.scores.find(column);
        const auto score = points == l.scores.end() ? std::nullopt : value_at(points->second, budget, true);
        any = any || score;
        row.cells.push_back(cell(score, "{:.1f}"));
      }
      row.cells.push_back(selector ? percent(*selector, 0) : "-");
      if (any) rows.push_back(std::move(row));
    }
    std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.order > b.order; });
    std::vector<std::string> head = {"attention", "recovered gap", "output error"};
    head.insert(head.end(), columns_.begin(), columns_.end());
    head.push_back("of the bytes: to choose");
    std::vector<std::vector<std::string>> cells = {{"`full` (all bytes)", "1.000", "0.000"}};
    for (const std::string& column : columns_) cells[0].push_back(cell(full_.at(column), "{:.1f}"));
    cells[0].push_back("0 %");
    for (Row& row : rows) cells.push_back(std::move(row.cells));
    s_.table(
        fmt::format("All methods at {} of full attention's bytes, by recovered gap.", percent(budget, 0)),
        std::move(head), std::move(cells));
  }

  const Section& s_;
  std::vector<Ladder> ladders_;
  std::vector<std::string> columns_;
  std::map<std::string, double> full_;
};

}  // namespace

void write_ranking(const Section& section) {
  section.page.paragraph(
      "Every method is measured at several budgets; its values at equal bytes lie between its own two "
      "nearest points, "
      "linear in the logarithm of the bytes, and a dash stands where its points do not reach. Bytes are "
      "those of the "
      "chosen keys and values, of sink and window, and those read to choose them; what a method writes to "
      "keep its "
      "index up to date is not in them.");
  Ranking(section).write();
}

}  // namespace lode
