// SPDX-License-Identifier: Apache-2.0
#include "lab/report/ranking.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "lab/report/report.h"
#include "model/config.h"

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

IndexShares index_shares(const Spec& spec, const ModelConfig& config, std::int64_t tokens,
                         std::int64_t kv_bytes) {
  const MethodInfo& info = find_method(spec.name);
  if (!info.index_bytes || tokens < 2) return {};
  const std::int64_t half = tokens / 2;
  double all = 0, first = 0;  // bytes over all keys and over half of them
  for (int layer = spec.dense_layers; layer < config.layers; ++layer) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = config.query_heads,
                                    .kv_heads = config.kv_heads_of(layer),
                                    .head_dim = config.head_dim_of(layer),
                                    .dense = spec.dense,
                                    .covered = {}};
    all += static_cast<double>(info.index_bytes(spec, geometry, tokens));
    first += static_cast<double>(info.index_bytes(spec, geometry, half));
  }
  return {.held = all / static_cast<double>(kv_bytes),
          .update = (all - first) / static_cast<double>(tokens - half) / static_cast<double>(kv_bytes)};
}

namespace {

constexpr double kSmall = 0.05, kMiddle = 0.10, kLarge = 0.20;  // of full attention's bytes
constexpr double kPass = 0.9;                                   // of full attention's score

using Points = std::vector<std::pair<double, double>>;

/// What is measured of a method, as points over density.
struct Ladder {
  std::string label;
  IndexShares index = {};
  Points recovered = {}, error = {};
  Points selector = {}, asked_selector = {};  ///< bytes read to choose, in the probe and under questions
  std::map<std::string, Points> scores = {};  ///< by column (task, length and protocol)

  /// Where its points lie, of the probe or, without one, of the tasks.
  std::pair<double, double> reach() const {
    double low = std::numeric_limits<double>::infinity(), high = 0;
    const auto add = [&](const Points& points) {
      for (const auto& [x, y] : points) {
        low = std::min(low, x);
        high = std::max(high, x);
      }
    };
    add(recovered);
    if (recovered.empty())
      for (const auto& [column, points] : scores) add(points);
    return {low, high};
  }
};

/// Tasks of one fact: one right key of each head suffices, so they tell only who fails.
bool is_pass_mark(const std::string& column) {
  return column.starts_with("needle") || column.starts_with("passkey") || column.starts_with("number");
}

std::string cell(const std::optional<double>& value, const char* format) {
  const double x = value.value_or(std::nan(""));
  return std::isfinite(x) ? fmt::format(fmt::runtime(format), x) : std::string("-");
}

class Ranking {
 public:
  explicit Ranking(const Section& section) : s_(section) {
    for (const SuiteRun& run : s_.suite.runs) {
      if (run.kind == RunKind::probe) read_probe(run);
      if (run.kind == RunKind::eval) read_eval(run);
    }
  }

  bool is_measured() const { return !ladders_.empty(); }

  void write() {
    std::stable_sort(ladders_.begin(), ladders_.end(), before);
    std::vector<std::vector<std::string>> rows = {row_of_full()};
    int place = 0;
    for (const Ladder& l : ladders_) {
      const bool ranked = value_at(l.recovered, kMiddle, true).has_value();
      rows.push_back(row_of(l, ranked ? std::to_string(++place) : "-"));
    }
    s_.table(
        fmt::format("All methods at equal bytes, by the recovered gap at {0} of full attention's. Output "
                    "error and scores at {0} too; exact and selector bytes are what these {0} are made of.",
                    percent(kMiddle, 0)),
        head(), std::move(rows));
  }

 private:
  Ladder& ladder(const GridMethod& method, std::int64_t tokens) {
    const std::string name = series_of(method.label);
    const auto found =
        std::find_if(ladders_.begin(), ladders_.end(), [&](const Ladder& l) { return l.label == name; });
    if (found != ladders_.end()) return *found;
    return ladders_.emplace_back(Ladder{.label = name,
                                        .index = index_shares(method.named.spec, s_.grid.model().config(),
                                                              tokens, s_.grid.kv_bytes(tokens))});
  }

  void read_probe(const SuiteRun& run) {
    const std::vector<GridMethod> methods = s_.grid.methods(run);
    const std::vector<Json> rows = s_.grid.probe(run, run.lengths.back());
    for (std::size_t i = 0; i < methods.size(); ++i) {
      if (!rows[i].is_object() || methods[i].named.name == "full") continue;
      Ladder& l = ladder(methods[i], run.lengths.back());
      const double density = rows[i].at("density").get<double>();
      if (rows[i].at("recovered").is_number())
        l.recovered.emplace_back(density, rows[i].at("recovered").get<double>());
      if (json_has(rows[i], "selector_share"))
        l.selector.emplace_back(density, rows[i].at("selector_share").get<double>());
      if (json_has(rows[i], "mean"))
        l.error.emplace_back(density, rows[i].at("mean").at("error").get<double>());
    }
  }

  void read_eval(const SuiteRun& run) {
    if (s_.grid.samples(run).empty()) return;  // not measured yet
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
          Ladder& l = ladder(m, row.tokens);
          l.scores[column].emplace_back(row.density, row.score);
          if (row.density > 0) l.asked_selector.emplace_back(row.density, row.selector_share);
        }
      }
    }
  }

  /// By the recovered gap at the middle budget; those that do not come down to it by the large one, and by
  /// how near they come.
  static bool before(const Ladder& a, const Ladder& b) {
    for (const double budget : {kMiddle, kLarge}) {
      const auto at_a = value_at(a.recovered, budget, true), at_b = value_at(b.recovered, budget, true);
      if (at_a.has_value() != at_b.has_value()) return at_a.has_value();
      if (at_a && *at_a != *at_b) return *at_a > *at_b;
    }
    const auto away = [](const Ladder& l) {
      const auto [low, high] = l.reach();
      return low > kMiddle ? low / kMiddle : kMiddle / std::max(high, 1e-9);
    };
    return away(a) < away(b);
  }

  std::vector<std::string> head() const {
    std::vector<std::string> head = {"attention", "place"};
    for (const double budget : {kSmall, kMiddle, kLarge})
      head.push_back("recovered gap at " + percent(budget, 0));
    head.emplace_back("output error");
    head.insert(head.end(), columns_.begin(), columns_.end());
    for (const char* name :
         {"bytes measured", "exact bytes", "selector bytes", "update bytes", "index, of K and V"})
      head.emplace_back(name);
    return head;
  }

  std::vector<std::string> row_of_full() const {
    std::vector<std::string> row = {"`full`", "", "1.000", "1.000", "1.000", "0.000"};
    for (const std::string& column : columns_) row.push_back(cell(full_.at(column), "{:.1f}"));
    row.insert(row.end(), {"100 %", "100 %", "0 %", "0 %", "0 %"});
    return row;
  }

  std::vector<std::string> row_of(const Ladder& l, const std::string& place) const {
    std::vector<std::string> row = {"`" + l.label + "`", place};
    for (const double budget : {kSmall, kMiddle, kLarge})
      row.push_back(cell(value_at(l.recovered, budget, true), "{:.3f}"));
    row.push_back(cell(value_at(l.error, kMiddle, false), "{:.3f}"));
    for (const std::string& column : columns_) {
      const auto points = l.scores.find(column);
      const std::optional<double> score =
          value_at(points == l.scores.end() ? Points() : points->second, kMiddle, true);
      const double least = std::max(1.0, kPass * full_.at(column));
      row.push_back(is_pass_mark(column) && score.value_or(0) >= least ? "pass" : cell(score, "{:.1f}"));
    }
    const auto [low, high] = l.reach();
    row.push_back(low > high           ? "-"
                  : high < 1.001 * low ? percent(low, 1)
                                       : fmt::format("{:.1f} to {}", 100 * low, percent(high, 1)));
    const auto selector = value_at(l.selector.empty() ? l.asked_selector : l.selector, kMiddle, false);
    row.push_back(selector ? percent(kMiddle - *selector, 1) : "-");
    row.push_back(selector ? percent(*selector, 1) : "-");
    row.push_back(percent(l.index.update, 4));
    row.push_back(percent(l.index.held, 0));
    return row;
  }

  const Section& s_;
  std::vector<Ladder> ladders_;
  std::vector<std::string> columns_;
  std::map<std::string, double> full_;
};

}  // namespace

void write_ranking(const Section& section) {
  Ranking ranking(section);
  if (!ranking.is_measured())
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
  ranking.write();
  section.page.paragraph(section.suite.explanation);
}

}  // namespace lode
