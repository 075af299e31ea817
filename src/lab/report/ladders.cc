// SPDX-License-Identifier: Apache-2.0
#include "lab/report/ladders.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lab/report/report.h"
#include "lab/report/sections.h"
#include "model/config.h"

namespace lode {

std::optional<double> value_at(Points points, double x, bool more_is_better) {
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

std::optional<double> Ladder::at(double density, double LadderStep::*value) const {
  Points points;
  for (const LadderStep& step : steps) points.emplace_back(step.density, step.*value);
  return value_at(std::move(points), density, value == &LadderStep::recovered);
}

std::optional<double> Ladder::score_at(double density, const std::string& column) const {
  const auto found = scores.find(column);
  return found == scores.end() ? std::nullopt : value_at(found->second, density, true);
}

std::optional<double> Ladder::selector_at(double density) const {
  const bool is_probed = std::any_of(steps.begin(), steps.end(),
                                     [](const LadderStep& step) { return std::isfinite(step.selector); });
  return is_probed ? at(density, &LadderStep::selector) : value_at(asked_selector, density, false);
}

std::pair<double, double> Ladder::reach() const {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  const auto add = [&](double density) {
    low = std::min(low, density);
    high = std::max(high, density);
  };
  for (const LadderStep& step : steps)
    if (std::isfinite(step.recovered)) add(step.density);
  if (high > 0) return {low, high};
  for (const auto& [column, points] : scores)
    for (const auto& [density, score] : points) add(density);
  return {low, high};
}

bool is_pass_mark(const std::string& column) {
  return column.starts_with("needle") || column.starts_with("passkey") || column.starts_with("number");
}

double pass_mark(const Ladders& ladders, const std::string& column) {
  return std::max(1.0, kPass * ladders.full.at(column));
}

namespace {

/// By the recovered gap at the middle budget; those that do not come down to it by the large one, and by how
/// near they come.
bool is_before(const Ladder& a, const Ladder& b) {
  for (const double budget : {kMiddle, kLarge}) {
    const auto at_a = a.at(budget, &LadderStep::recovered), at_b = b.at(budget, &LadderStep::recovered);
    if (at_a.has_value() != at_b.has_value()) return at_a.has_value();
    if (at_a && *at_a != *at_b) return *at_a > *at_b;
  }
  const auto away = [](const Ladder& l) {
    const auto [low, high] = l.reach();
    return low > kMiddle ? low / kMiddle : kMiddle / std::max(high, 1e-9);
  };
  return away(a) < away(b);
}

class Reader {
 public:
  Reader(const MeasurementRunner& grid, const Suite& suite) : grid_(grid), suite_(suite) {}

  Ladders read() && {
    for (const SuiteRun& run : suite_.runs) {
      if (run.kind == RunKind::probe) read_probe(run);
      if (run.kind == RunKind::eval) read_eval(run);
    }
    std::stable_sort(ladders_.methods.begin(), ladders_.methods.end(), is_before);
    return std::move(ladders_);
  }

 private:
  Ladder& ladder(const GridMethod& method, std::int64_t tokens) {
    const std::string name = series_of(method.label);
    std::vector<Ladder>& all = ladders_.methods;
    const auto found = std::find_if(all.begin(), all.end(), [&](const Ladder& l) { return l.label == name; });
    if (found != all.end()) return *found;
    return all.emplace_back(Ladder{
        .label = name,
        .index = index_shares(method.named.spec, grid_.model().config(), tokens, grid_.kv_bytes(tokens))});
  }

  void read_probe(const SuiteRun& run) {
    const std::vector<GridMethod> methods = grid_.methods(run);
    const std::vector<Json> rows = grid_.probe(run, run.lengths.back());
    for (std::size_t i = 0; i < methods.size(); ++i) {
      if (!rows[i].is_object() || methods[i].named.name == "full") continue;
      ladder(methods[i], run.lengths.back())
          .steps.push_back({.label = methods[i].label,
                            .density = member(rows[i], "density"),
                            .recovered = member(rows[i], "recovered"),
                            .error = member(json_member(rows[i], "mean"), "error"),
                            .selector = member(rows[i], "selector_share"),
                            .far_keys = member(rows[i], "selectivity")});
    }
  }

  void read_eval(const SuiteRun& run) {
    if (grid_.samples(run).empty()) return;  // not measured yet
    for (const Protocol& protocol : run.protocols) {
      for (const EvalRow& row : grid_.eval(run, protocol).rows) {
        const std::string length =
            row.tokens > 0 ? " " + length_name(row.tokens) : "";  // unknown of a user's
        const std::string column = fmt::format("{}{} ({})", row.task, length, protocol.str());
        std::vector<std::string>& columns = ladders_.columns;
        if (std::find(columns.begin(), columns.end(), column) == columns.end()) columns.push_back(column);
        if (row.attention == "full") {
          ladders_.full[column] = row.score;
          continue;
        }
        for (const GridMethod& m : grid_.methods(run)) {
          if (m.named.name != row.attention) continue;
          Ladder& l = ladder(m, row.tokens);
          l.scores[column].emplace_back(row.density, row.score);
          if (row.density > 0) l.asked_selector.emplace_back(row.density, row.selector_share);
        }
      }
    }
  }

  const MeasurementRunner& grid_;
  const Suite& suite_;
  Ladders ladders_;
};

}  // namespace

Ladders read_ladders(const MeasurementRunner& grid, const Suite& suite) {
  return Reader(grid, suite).read();
}

}  // namespace lode
