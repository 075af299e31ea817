// SPDX-License-Identifier: Apache-2.0
// The tables and figures of runs that look at the model alone: how queries lie to keys, how evenly buckets
// are filled, what a classifier learns.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/text.h"
#include "lab/report/ranking.h"
#include "lab/report/sections.h"

namespace lode {

namespace {

Axis axis(std::string title) {
  Axis axis;
  axis.title = std::move(title);
  return axis;
}

Axis share_axis(std::string title, bool log, std::optional<double> low = {}) {
  Axis axis;
  axis.title = std::move(title);
  axis.unit = Axis::Unit::percent;
  axis.log = log;
  axis.low = low;
  return axis;
}

std::string number(double value) {
  return fmt::format("{:.3f}", value);
}

std::vector<ChartPoint> points_of(const Json& pairs) {
  std::vector<ChartPoint> points;
  for (const Json& pair : pairs)
    points.push_back({.x = pair.at(0).get<double>(), .y = pair.at(1).get<double>()});
  return points;
}

/// Shares over what has them; empty bins say nothing.
std::vector<ChartPoint> points_of(const Json& xs, const Json& shares) {
  std::vector<ChartPoint> points;
  for (std::size_t i = 0; i < xs.size(); ++i)
    if (shares.at(i).get<double>() > 0)
      points.push_back({.x = xs.at(i).get<double>(), .y = shares.at(i).get<double>()});
  return points;
}

/// The recall where `share` of the keys are scanned, between the two measured points around it.
std::string recall_at(const Json& search, double share) {
  std::vector<std::pair<double, double>> points;
  for (const Json& point : search) points.emplace_back(point.at(0).get<double>(), point.at(1).get<double>());
  const std::optional<double> recall = value_at(std::move(points), share, true);
  return recall ? number(*recall) : "-";
}

void axes_figure(const Section& s, const Json& study, const std::string& where) {
  const Json& axes = study.at("axes");
  const LineChart chart = {
      .title = "Keys and queries on two axes, " + where,
      .x = axis("first principal axis"),
      .y = axis("second principal axis"),
      .series = {{"keys", 0, points_of(axes.at("keys"))},
                 {"queries", 1, points_of(axes.at("queries"))},
                 {"the first key", 0, points_of(Json::array({axes.at("first_key")})), true},
                 {"the first query", 1, points_of(Json::array({axes.at("first_query")})), true}},
      .rules = {},
      .joined = false};
  s.figure(fmt::format("{}. The axes hold {} of the spread.", chart.title,
                       percent(axes.at("shown").get<double>(), 0)),
           chart);
}

void dots_figure(const Section& s, const Json& study, const std::string& where) {
  const Json& scores = study.at("scores");
  const Axis share = share_axis("share of the pairs", false, 0.0);
  const LineChart chart = {
      .title = "Dot products of queries and keys, " + where,
      .x = axis("q · k / √d"),
      .y = share,
      .series = {{"far keys", 0, points_of(scores.at("middles"), scores.at("far"))},
                 {"the 64 newest keys of the query", 2, points_of(scores.at("middles"), scores.at("recent"))},
                 {"the first key", 1, points_of(scores.at("middles"), scores.at("first"))}}};
  s.figure(chart.title + ", of queries in the last eighth of the text.", chart);
}

void clusters_figure(const Section& s, const Json& study, const std::string& where) {
  const Json &keys = study.at("assigned").at("keys"), &queries = study.at("assigned").at("queries");
  const auto empty =
      std::count_if(queries.begin(), queries.end(), [](const Json& q) { return q.get<double>() == 0; });
  const Axis x = share_axis("share of the keys", true);
  const Axis y = share_axis("share of the queries", true);
  const LineChart chart = {.title = "Clusters of the keys, and where queries fall, " + where,
                           .x = x,
                           .y = y,
                           .series = {{"a cluster", 0, points_of(keys, queries)}},
                           .rules = {},
                           .joined = false};
  s.figure(fmt::format("{}. {} of {} clusters, into which no query falls, are not shown.", chart.title, empty,
                       keys.size()),
           chart);
}

void search_figure(const Section& s, const std::vector<Json>& studies, const std::string& length) {
  const Axis x = share_axis("share of the keys scanned", true);
  LineChart chart = {
      .title = "What an inverted file finds, " + length, .x = x, .y = axis("recall of the 100 best keys")};
  chart.y.low = 0.0;
  chart.y.high = 1.0;
  for (std::size_t i = 0; i < studies.size(); ++i) {
    for (const bool keys : {false, true}) {
      const std::string who = keys ? "keys" : "queries";
      chart.series.push_back({fmt::format("{} ask, layer {}", who, studies[i].at("layer").get<int>()),
                              static_cast<int>(i) + (keys ? 8 : 0),
                              points_of(studies[i].at("search").at(who))});
    }
  }
  s.figure(chart.title + ": clusters are scanned whole, those of the largest q · centroid first.", chart);
}

void distance_figure(const Section& s, const Json& study, const std::string& where) {
  const Json& distance = study.at("distance");
  const Axis share = share_axis("share of the vectors", false, 0.0);
  const LineChart chart = {
      .title = "Distance to the keys, " + where,
      .x = axis("Mahalanobis distance to the distribution of the keys"),
      .y = share,
      .series = {{"keys", 0, points_of(distance.at("middles"), distance.at("keys"))},
                 {"queries", 1, points_of(distance.at("middles"), distance.at("queries"))}}};
  s.figure(chart.title + ", of the last eighth of the text to the rest.", chart);
}

void key_query_table(const Section& s, const std::vector<Json>& studies, const std::string& length) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& study : studies) {
    const Json &search = study.at("search"), &distance = study.at("distance"), &scores = study.at("scores");
    const auto largest = [&](const char* of) {
      double most = 0;
      for (const Json& share : study.at("assigned").at(of)) most = std::max(most, share.get<double>());
      return percent(most, 1);
    };
    rows.push_back({std::to_string(study.at("layer").get<int>())});
    for (const char* of : {"far", "recent", "first"})
      rows.back().push_back(fmt::format("{:.2f}", scores.at("medians").at(of).get<double>()));
    for (const char* of : {"keys", "queries"}) rows.back().push_back(largest(of));
    for (const char* of : {"keys", "queries"}) rows.back().push_back(recall_at(search.at(of), 0.05));
    for (const char* of : {"keys", "queries"})
      rows.back().push_back(fmt::format("{:.1f}", distance.at("medians").at(of).get<double>()));
  }
  s.table(
      fmt::format("Queries beside keys at {}, first KV head of a layer: medians of q · k / √d, the largest "
                  "cluster's share, recall of the 100 best keys where an inverted file scans 5 % of the keys "
                  "(between the two measured points around it), median "
                  "Mahalanobis distance to the keys.",
                  length),
      {"layer", "far", "recent", "first key", "largest, keys", "largest, queries", "recall, keys ask",
       "recall, queries ask", "distance, keys", "distance, queries"},
      std::move(rows));
}

}  // namespace

void write_key_query(const Section& s) {
  for (const std::int64_t tokens : s.run.lengths) {
    const std::vector<Json> studies = s.grid.study(s.run, tokens);
    if (studies.empty()) {
      s.page.paragraph("Not measured yet.");
      continue;
    }
    const std::string length = length_name(tokens) + " tokens";
    const Json& middle = studies[studies.size() / 2];  // pictures are of one head, as in the papers
    const std::string where = fmt::format("layer {}, {}", middle.at("layer").get<int>(), length);
    if (s.shows(Show::table)) key_query_table(s, studies, length);
    if (s.shows(Show::axes)) axes_figure(s, middle, where);
    if (s.shows(Show::dot_products)) dots_figure(s, middle, where);
    if (s.shows(Show::cluster_shares)) clusters_figure(s, middle, where);
    if (s.shows(Show::search)) search_figure(s, studies, length);
    if (s.shows(Show::distance)) distance_figure(s, middle, where);
  }
}

void write_drift(const Section& s) {
  for (const std::int64_t tokens : s.run.lengths) {
    const std::vector<Json> studies = s.grid.study(s.run, tokens);
    if (studies.empty()) s.page.paragraph("Not measured yet.");
    std::vector<std::vector<std::string>> table;
    for (const Json& study : studies) {
      const int layer = study.at("layer").get<int>();
      DotChart chart = {.title = fmt::format("Deviation of bucket sizes, layer {}, {} texts of {} tokens",
                                             layer, 2 * s.run.texts, length_name(tokens)),
                        .x = axis("standard deviation of bucket sizes / mean"),
                        .kinds = {"after RoPE", "before RoPE"},
                        .rows = {}};
      chart.x.log = true;
      for (const Json& sample : study.at("samples")) {
        const std::string of = sample.at("of");
        auto row =
            std::find_if(chart.rows.begin(), chart.rows.end(), [&](const auto& r) { return r.label == of; });
        if (row == chart.rows.end()) row = chart.rows.insert(row, {of, {{}, {}}});
        const bool rope = sample.at("rope").get<bool>();
        std::vector<double>& dots = row->dots[rope ? 0 : 1];
        dots = sample.at("deviations").get<std::vector<double>>();
        const auto [low, high] = std::minmax_element(dots.begin(), dots.end());
        table.push_back({fmt::format("{}, {} RoPE", of, rope ? "after" : "before"), std::to_string(layer),
                         number(*low), number(*high)});
      }
      if (s.shows(Show::deviations))
        s.figure(
            chart.title +
                ". Each dot is one draw of half as many keys (of queries in the last row), assigned to 64 "
                "centroids of the training texts' keys.",
            svg_of(chart));
    }
    if (s.shows(Show::table) && !table.empty())
      s.table("Standard deviation of bucket sizes over their mean, least and most of ten draws.",
              {"drawn from", "layer", "least", "most"}, std::move(table));
  }
}

void write_training(const Section& s) {
  for (const std::int64_t tokens : s.run.lengths) {
    const std::vector<Json> studies = s.grid.study(s.run, tokens);
    if (studies.empty()) {
      s.page.paragraph("Not measured yet.");
      continue;
    }
    const Json& shares = studies.front().at("shares");
    const Axis x = share_axis("share of the far keys read", true);
    const Axis y = share_axis("attention on far keys captured", false, 0.0);
    LineChart chart = {.title = fmt::format("Variants of training, {} texts of {} tokens, {}", s.run.texts,
                                            length_name(tokens), counted(s.run.steps, "step")),
                       .x = x,
                       .y = y};
    std::vector<std::vector<std::string>> table;
    const auto add = [&](const std::string& name, const Json& captured, const std::string& loss) {
      Series line = {.label = name, .style = static_cast<int>(chart.series.size())};
      table.push_back({name, loss});
      for (std::size_t i = 0; i < shares.size(); ++i) {
        line.points.push_back({.x = shares.at(i).get<double>(), .y = captured.at(i).get<double>()});
        table.back().push_back(percent(line.points.back().y, 1));
      }
      chart.series.push_back(std::move(line));
    };
    for (const Json& study : studies)
      add(study.at("variant"), study.at("captured"), number(study.at("loss").get<double>()));
    add("q · centroid", studies.front().at("centroids"), "-");
    add("at most", studies.front().at("best"), "-");
    if (s.shows(Show::captured))
      s.figure(chart.title +
                   ". Of the attention on far keys of a text that nothing was trained on, what lies in the "
                   "buckets ranked first; means over heads.",
               chart);
    if (s.shows(Show::table))
      s.table("Attention on far keys that is captured where so many of them are read; loss in nats.",
              {"variant", "loss", "2 %", "5 %", "10 %"}, std::move(table));
  }
}

}  // namespace lode
