// SPDX-License-Identifier: Apache-2.0
#include "lab/report/sections.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <span>

#include "base/text.h"
#include "lab/report/report.h"
#include "lab/report/svg_draw.h"
#include "lab/studies/recall.h"
#include "model/config.h"

namespace lode {

namespace {

std::string join_sentences(const std::string& first, const std::string& second) {
  return first.empty() || second.empty() ? first + second : first + " " + second;
}

/// What an eval run gave a method under one protocol at one length, over its tasks.
struct MethodScore {
  std::string label;
  NamedSpec named;
  double score = 0, agreement = 0, density = 0, selectivity = 0, seconds = 0;
  std::int64_t n = 0;
  std::map<std::string, double> by_task;
  double exact_layers = 0;                         ///< share of the layers, which attend all keys
  std::map<std::string, double> far_keys_by_task;  ///< of the layers that choose, as papers count them
};

/// The rows of a report at one length (0 = all) as means over tasks, `full` first.
std::vector<MethodScore> scores_of(const Section& s, const EvalReport& report, std::int64_t length) {
  std::vector<MethodScore> scores = {{.label = "full", .named = {"full", parse_spec("full")}}};
  std::map<std::string, std::size_t> index = {{"full", 0}};
  for (const GridMethod& m : s.grid.methods(s.run)) {
    if (!index.emplace(m.named.name, scores.size()).second) continue;
    scores.push_back({.label = m.label, .named = m.named});
    scores.back().exact_layers =
        static_cast<double>(m.named.spec.dense_layers) / static_cast<double>(s.grid.model().config().layers);
  }
  std::map<std::size_t, double> cells;
  for (const EvalRow& row : report.rows) {
    if (length != 0 && row.tokens != length) continue;
    const std::size_t i = index.at(row.attention);
    MethodScore& m = scores[i];
    cells[i] += 1;
    m.score += row.score;
    m.agreement += row.agreement;
    m.density += row.density;
    m.selectivity += row.selectivity;
    m.seconds += row.seconds;
    m.n += row.n;
    m.by_task[row.task] += row.score;
    m.far_keys_by_task[row.task] += row.selectivity;
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    MethodScore& m = scores[i];
    const double n = std::max(1.0, cells[i]);
    m.score /= n;
    m.agreement /= n;
    m.density /= n;
    m.selectivity /= n;
    m.seconds /= std::max<double>(1.0, static_cast<double>(m.n));
    const double lengths = n / std::max<double>(1.0, static_cast<double>(m.by_task.size()));
    for (auto& [task, score] : m.by_task) score /= lengths;
    for (auto& [task, share] : m.far_keys_by_task) {
      share = share / lengths - m.exact_layers;
      share = m.exact_layers < 1 ? std::max(0.0, share / (1 - m.exact_layers)) : 1.0;
    }
  }
  return scores;
}

std::vector<std::int64_t> lengths_of(const EvalReport& report) {
  std::set<std::int64_t> lengths;
  for (const EvalRow& row : report.rows) lengths.insert(row.tokens);
  return {lengths.begin(), lengths.end()};
}

/// How far a method's mean over tasks lies from full attention's on the same questions. A task counts alike
/// however many questions it has, as in that mean.
Interval less_full(const Section& s, std::span<const Sample> samples, const NamedSpec& full,
                   const NamedSpec& method, const Protocol& protocol) {
  std::map<std::string, double> asked;  // questions by task
  for (const Sample& sample : samples) asked[sample.task] += 1;
  const double even = static_cast<double>(samples.size()) / static_cast<double>(asked.size());
  std::map<const std::string*, std::int64_t> texts;
  std::vector<double> points;
  std::vector<std::int64_t> text;
  for (const Sample& sample : samples) {
    const double difference =
        s.grid.answer(sample, method, protocol).score - s.grid.answer(sample, full, protocol).score;
    points.push_back(100 * difference * even / asked[sample.task]);
    text.push_back(texts.emplace(sample.context.get(), std::ssize(texts)).first->second);
  }
  return difference_by_document(points, text);
}

/// "-3.2 ± 1.9"; a dash where the texts are too few to tell.
std::string with_half_interval(const Interval& interval) {
  if (!interval.low) return "-";
  const double half = std::max(interval.mean - *interval.low, *interval.high - interval.mean);
  return fmt::format("{:+.1f} ± {:.1f}", interval.mean, half);
}

void score_table(const Section& s, const std::vector<MethodScore>& scores, const Protocol& protocol,
                 std::int64_t length, const std::string& what) {
  std::vector<Sample> samples = s.grid.samples(s.run);
  std::erase_if(samples, [&](const Sample& sample) { return length != 0 && sample.tokens != length; });
  std::vector<std::string> head = {"attention"};
  for (const auto& [task, score] : scores.front().by_task) head.push_back(task);
  for (const char* name : {"mean", "less full", "agreement", "density", "far keys", "questions"})
    head.emplace_back(name);
  std::vector<std::vector<std::string>> rows;
  for (const MethodScore& m : scores) {
    std::vector<std::string> row = {"`" + m.label + "`"};
    for (const auto& [task, score] : m.by_task) row.push_back(fmt::format("{:.1f}", score));
    row.push_back(fmt::format("{:.1f}", m.score));
    row.push_back(&m == &scores.front()
                      ? ""
                      : with_half_interval(less_full(s, samples, scores.front().named, m.named, protocol)));
    row.push_back(fmt::format("{:.3f}", m.agreement));
    row.push_back(percent(m.density));
    row.push_back(percent(m.selectivity));
    row.push_back(std::to_string(m.n));
    rows.push_back(std::move(row));
  }
  s.table(what +
              " \"less full\": the mean less full attention's on the same questions, ± half its 95 % "
              "interval by text.",
          std::move(head), std::move(rows));
}

Axis score_axis() {
  return {.title = "mean score (percent)", .low = 0, .high = 100};
}

/// Score over `x` of every method, with full attention's as a rule, and as a point where that is not at 100
/// %.
void score_chart(const Section& s, const std::vector<MethodScore>& scores, const std::string& what,
                 double MethodScore::*x, const Axis& axis, const std::string& warning = {}) {
  const bool full_has_point = x == &MethodScore::seconds;
  std::vector<MethodPoint> points;
  for (std::size_t i = full_has_point ? 0 : 1; i < scores.size(); ++i)
    points.push_back({scores[i].label, scores[i].*x, scores[i].score, {}, {}});
  const Axis score = score_axis();
  const LineChart chart = {.title = "Score by " + axis.title + ", " + what,
                           .x = axis,
                           .y = score,
                           .series = series_from(points),
                           .rules = {{full_has_point ? "" : "full", scores.front().score}}};
  s.figure(join_sentences(chart.title + ".", warning), chart);
}

/// One picture a task, where their mean would hide what sets them apart.
void task_charts(const Section& s, const std::vector<MethodScore>& scores, const std::string& what,
                 const std::string& so_far) {
  const Axis keys = {
      .title = "far keys attended in layers that choose", .unit = Axis::Unit::percent, .log = true};
  for (const auto& [task, of_full] : scores.front().by_task) {
    std::vector<MethodPoint> points;
    for (std::size_t i = 1; i < scores.size(); ++i)
      points.push_back(
          {scores[i].label, scores[i].far_keys_by_task.at(task), scores[i].by_task.at(task), {}, {}});
    const Axis score = {.title = "score (percent)", .low = 0, .high = 100};
    const LineChart chart = {.title = fmt::format("{}: score by {}, {}", task, keys.title, what),
                             .x = keys,
                             .y = score,
                             .series = series_from(points),
                             .rules = {{"full", of_full}}};
    s.figure(join_sentences(chart.title + ".", so_far), chart);
  }
}

void far_keys_table(const Section& s, const std::vector<MethodScore>& scores, const std::string& what,
                    const std::string& so_far) {
  std::vector<std::string> head = {"attention"};
  for (const auto& [task, share] : scores.front().far_keys_by_task) head.push_back(task);
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 1; i < scores.size(); ++i) {
    rows.push_back({"`" + scores[i].label + "`"});
    for (const auto& [task, share] : scores[i].far_keys_by_task) rows.back().push_back(percent(share, 1));
  }
  s.table(join_sentences("Share of the far keys attended in layers that choose, by task, at " + what + ".",
                         so_far),
          std::move(head), std::move(rows));
}

/// A line a task and method that has several budgets.
void far_keys_chart(const Section& s, const std::vector<MethodScore>& scores, const std::string& what,
                    const std::string& so_far) {
  std::map<std::string, std::vector<const MethodScore*>> methods;
  for (std::size_t i = 1; i < scores.size(); ++i)
    if (budget_of(scores[i].label)) methods[series_of(scores[i].label)].push_back(&scores[i]);
  const Axis x = {.title = "budget (number of clusters visited, of keys)", .log = true};
  const Axis y = {
      .title = "far keys attended in layers that choose", .unit = Axis::Unit::percent, .log = true};
  for (const auto& [method, points] : methods) {
    if (points.size() < 2) continue;
    LineChart chart = {.title = fmt::format("{}: far keys by budget, {}", method, what), .x = x, .y = y};
    for (const auto& [task, share] : points.front()->far_keys_by_task) {
      Series line = {.label = task, .style = static_cast<int>(chart.series.size())};
      for (const MethodScore* m : points)
        line.points.push_back({.x = *budget_of(m->label), .y = m->far_keys_by_task.at(task)});
      std::sort(line.points.begin(), line.points.end(),
                [](const auto& a, const auto& b) { return a.x < b.x; });
      chart.series.push_back(std::move(line));
    }
    s.figure(join_sentences(chart.title + ".", so_far), chart);
  }
}

void length_chart(const Section& s, const EvalReport& report, const std::string& protocol) {
  std::map<std::string, Series> lines;
  std::vector<std::string> order;
  for (const std::int64_t length : lengths_of(report)) {
    for (const MethodScore& m : scores_of(s, report, length)) {
      if (lines.emplace(m.label, Series{m.label, style_of(m.label), {}}).second) order.push_back(m.label);
      lines[m.label].points.push_back(
          {.x = static_cast<double>(length),
           .y = m.score,
           .tip = fmt::format("{} at {}: {:.1f}", m.label, length_name(length), m.score)});
    }
  }
  const Axis x = {.title = "tokens of the prompt", .unit = Axis::Unit::tokens, .log = true}, y = score_axis();
  LineChart chart = {.title = "Score by length, " + protocol, .x = x, .y = y};
  for (const std::string& label : order) chart.series.push_back(lines[label]);
  s.figure(join_sentences(chart.title + ".", answered_so_far(s.grid, s.run)), chart);
}

constexpr int kDepths = 5;

void needle_maps(const Section& s, const Protocol& protocol) {
  HeatMaps maps = {.title = "Needles found, by depth and length, " + protocol.str(),
                   .x_title = "tokens",
                   .y_title = "depth",
                   .scale_title = "score",
                   .percent = true};
  const std::vector<Sample> samples = s.grid.samples(s.run);
  if (std::none_of(samples.begin(), samples.end(),
                   [](const Sample& sample) { return sample.depth.has_value(); }))
    return s.page.paragraph(maps.title + ": none of the samples tells the depth of what it asks for.");
  std::set<std::int64_t> lengths;
  for (const Sample& sample : samples) lengths.insert(sample.tokens);
  std::vector<GridMethod> methods = {{"full", {"full", parse_spec("full")}}};
  for (const GridMethod& m : s.grid.methods(s.run)) {
    if (m.named.name != "full") methods.push_back(m);
  }
  for (const GridMethod& m : methods) {
    HeatMaps::Panel panel = {.title = m.label};
    for (const std::int64_t length : lengths)
      panel.columns.push_back(length > 0 ? length_name(length) : "any");
    for (int d = 0; d < kDepths; ++d)
      panel.rows.push_back(fmt::format("{}-{} %", 100 * d / kDepths, 100 * (d + 1) / kDepths));
    panel.cells.assign(kDepths, std::vector<std::optional<double>>(lengths.size()));
    std::vector<std::vector<int>> counts(kDepths, std::vector<int>(lengths.size()));
    for (const Sample& sample : samples) {
      if (!sample.depth) continue;
      const auto row = static_cast<std::size_t>(std::min(kDepths - 1.0, std::floor(*sample.depth * kDepths)));
      const auto column =
          static_cast<std::size_t>(std::distance(lengths.begin(), lengths.find(sample.tokens)));
      auto& cell = panel.cells[row][column];
      cell = cell.value_or(0.0) + s.grid.answer(sample, m.named, protocol).score;
      counts[row][column] += 1;
    }
    for (std::size_t r = 0; r < counts.size(); ++r) {
      for (std::size_t c = 0; c < counts[r].size(); ++c) {
        if (panel.cells[r][c]) *panel.cells[r][c] /= counts[r][c];
      }
    }
    maps.panels.push_back(std::move(panel));
  }
  s.figure(join_sentences(maps.title + ". Each cell is the share of the answers that are right, in percent; "
                                       "a dashed cell has no sample.",
                          answered_so_far(s.grid, s.run)),
           svg_of(maps));
}

std::string number(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "-";
}

}  // namespace

double member(const Json& row, const char* key) {
  return json_has(row, key) && row.at(key).is_number() ? row.at(key).get<double>() : std::nan("");
}

bool Section::shows(Show show) const {
  return std::find(run.show.begin(), run.show.end(), show) != run.show.end();
}

void Section::figure(std::string caption, std::string svg, std::vector<std::string> told) const {
  page.figure(fmt::format("{}-{}", suite.name, ++figures), caption + " " + provenance, std::move(svg),
              std::move(told));
}

void Section::figure(const std::string& caption, const LineChart& chart) const {
  if (has_points(chart)) return figure(caption, svg_of(chart));
  if (grid.so_far()) page.paragraph(chart.title + ": not measured yet.");
}

void Section::table(std::string caption, std::vector<std::string> head,
                    std::vector<std::vector<std::string>> rows) const {
  if (!rows.empty()) return page.table(caption + " " + provenance, std::move(head), std::move(rows));
  if (grid.so_far()) page.paragraph(caption + " Not measured yet.");
}

std::string length_name(std::int64_t tokens) {
  return tokens >= 1024 && tokens % 1024 == 0 ? fmt::format("{}k", tokens / 1024) : std::to_string(tokens);
}

/// Samples of a user may tell no length.
std::string at_length(std::int64_t tokens) {
  return tokens > 0 ? length_name(tokens) + " tokens" : "their own length";
}

std::string answered_so_far(const MeasurementRunner& grid, const SuiteRun& run,
                            std::optional<std::int64_t> length) {
  if (!grid.so_far()) return {};
  struct Count {
    std::int64_t there = 0, all = 0;
    std::set<std::string> tasks_there, tasks_all;
  };
  std::map<std::int64_t, Count> counts;  // by length
  for (const Sample& sample : grid.planned_samples(run)) {
    Count& count = counts[sample.tokens];
    ++count.all;
    count.tasks_all.insert(sample.task);
  }
  for (const Sample& sample : grid.samples(run)) {
    Count& count = counts[sample.tokens];
    ++count.there;
    count.tasks_there.insert(sample.task);
  }
  std::vector<std::string> parts;
  for (const auto& [tokens, count] : counts)
    if (count.there < count.all && tokens == length.value_or(tokens))
      parts.push_back(fmt::format("{} of {} and {} of {} at {}", count.there, counted(count.all, "question"),
                                  count.tasks_there.size(), counted(std::ssize(count.tasks_all), "task"),
                                  at_length(tokens)));
  return parts.empty() ? "" : "So far means rest on " + join(parts, "; ") + ".";
}

std::string percent(double share, int digits) {
  return std::isfinite(share) ? fmt::format("{:.{}f} %", 100 * share, digits) : "-";
}

std::vector<Series> series_from(const std::vector<MethodPoint>& points) {
  std::map<std::string, std::vector<const MethodPoint*>> lines;
  std::vector<std::string> order;
  for (const MethodPoint& p : points) {
    const std::string name = series_of(p.label);
    if (lines[name].empty()) order.push_back(name);
    lines[name].push_back(&p);
  }
  std::vector<Series> series;
  for (const std::string& name : order) {
    auto& line = lines[name];
    std::stable_sort(line.begin(), line.end(), [](auto* a, auto* b) { return a->x < b->x; });
    Series s = {.label = line.size() == 1 ? line.front()->label : name,
                .style = style_of(name == series_of(name) ? name : line.front()->label)};
    for (const MethodPoint* p : line) {
      s.points.push_back(
          {p->x, p->y, p->low, p->high, fmt::format("{}: {:.4g}, {:.4g}", p->label, p->x, p->y)});
    }
    series.push_back(std::move(s));
  }
  return series;
}

namespace {

/// On how many questions and texts scores rest.
std::string of_samples(const Section& s) {
  std::map<std::int64_t, std::pair<std::set<const std::string*>, std::int64_t>>
      of_length;  // texts, questions
  for (const Sample& sample : s.grid.samples(s.run)) {
    auto& [texts, questions] = of_length[sample.tokens];
    texts.insert(sample.context.get());
    ++questions;
  }
  std::vector<std::string> parts;
  for (const auto& [length, counted] : of_length)
    parts.push_back(fmt::format("{} about {} {} at {}", counted.second, counted.first.size(),
                                counted.first.size() == 1 ? "text" : "texts", at_length(length)));
  std::string text = join_sentences("Questions: " + join(parts, "; ") + ".", answered_so_far(s.grid, s.run));
  const bool mixed = s.run.shared > 0 && s.grid.has_own_tasks();
  if (mixed) text += " A text holds the facts of all tasks, and all suites ask about the same texts.";
  const bool asks_less = std::any_of(of_length.begin(), of_length.end(), [&](const auto& l) {
    return s.grid.has_own_tasks() && samples_at(s.run, l.first) < s.run.samples;
  });
  if (asks_less)
    text += fmt::format(
        " Beyond {} tokens a run asks a quarter of its questions: reading takes nearly all of the time.",
        length_name(kFullSamples));
  const bool few = std::any_of(of_length.begin(), of_length.end(),
                               [](const auto& l) { return l.second.first.size() < kLeastDocuments; });
  if (few)
    text += fmt::format(
        " Of fewer than {} texts no interval can be told: differences of one or two answers "
        "say little there.",
        kLeastDocuments);
  return text;
}

}  // namespace

void write_eval(const Section& s) {
  if (s.grid.samples(s.run).empty())
    return s.page.paragraph(s.grid.so_far() ? "Not measured yet."
                                            : "The texts hold no questions of these tasks.");
  s.page.paragraph(of_samples(s));
  const Axis bytes = {.title = "share of the bytes read", .unit = Axis::Unit::percent, .log = true};
  const Axis keys = {.title = "share of the far keys attended", .unit = Axis::Unit::percent, .log = true};
  const Axis time = {.title = "time of a question and its answer", .unit = Axis::Unit::seconds, .log = true};
  for (const Protocol& protocol : s.run.protocols) {
    const EvalReport report = s.grid.eval(s.run, protocol);
    const std::vector<std::int64_t> lengths = lengths_of(report);
    for (const std::int64_t length : lengths) {
      const std::vector<MethodScore> scores = scores_of(s, report, length);
      const std::string what = fmt::format("{}, {}", at_length(length), protocol.str());
      const std::string so_far = answered_so_far(s.grid, s.run, length);
      const std::string dense =
          s.run.dense.empty() ? "" : "; " + s.run.dense + " for methods and presets without their own";
      if (s.shows(Show::table))
        score_table(s, scores, protocol, length,
                    join_sentences(fmt::format("Scores in percent at {}{}.", what, dense), so_far));
      if (s.shows(Show::score_density)) score_chart(s, scores, what, &MethodScore::density, bytes, so_far);
      if (s.shows(Show::score_selectivity))
        score_chart(s, scores, what, &MethodScore::selectivity, keys, so_far);
      if (s.shows(Show::score_tasks)) task_charts(s, scores, what, so_far);
      if (s.shows(Show::far_keys_table)) far_keys_table(s, scores, what, so_far);
      if (s.shows(Show::far_keys_budget)) far_keys_chart(s, scores, what, so_far);
      if (s.shows(Show::score_time))
        score_chart(s, scores, what, &MethodScore::seconds, time,
                    join_sentences(so_far, busy_warning(s.grid.effort_of_answers().others_share())));
    }
    if (s.shows(Show::score_length) && lengths.size() > 1) length_chart(s, report, protocol.str());
    if (s.shows(Show::needle_map)) needle_maps(s, protocol);
  }
}

namespace {

void probe_table(const Section& s, const std::vector<GridMethod>& methods, const std::vector<Json>& rows,
                 const std::string& what) {
  std::vector<std::vector<std::string>> table;
  for (std::size_t i = 0; i < methods.size(); ++i) {
    const Json& mean = json_member(rows[i], "mean");
    table.push_back({"`" + methods[i].label + "`", number(member(rows[i], "loss"), "{:.3f}"),
                     number(member(rows[i], "recovered"), "{:.3f}"), percent(member(rows[i], "density")),
                     percent(member(rows[i], "selectivity")), number(member(mean, "recall"), "{:.3f}"),
                     number(member(mean, "mass"), "{:.3f}"), number(member(mean, "error"), "{:.3f}")});
  }
  s.table(what,
          {"attention", "loss (nats)", "recovered gap", "density", "far keys", "recall of top 64", "mass",
           "output error"},
          std::move(table));
}

void probe_chart(const Section& s, const std::vector<GridMethod>& methods, const std::vector<Json>& rows,
                 const std::string& title, const char* x, const Axis& x_axis, bool of_mean, const char* y,
                 const Axis& y_axis) {
  std::vector<MethodPoint> points;
  for (std::size_t i = 0; i < methods.size(); ++i) {
    if (methods[i].named.spec.name == "full") continue;
    const Json& from = of_mean ? json_member(rows[i], "mean") : rows[i];
    points.push_back({methods[i].label, member(rows[i], x), member(from, y), {}, {}});
  }
  const LineChart chart = {.title = title, .x = x_axis, .y = y_axis, .series = series_from(points)};
  s.figure(title + ".", chart);
}

/// Layer by head, one map a method.
void head_maps(const Section& s, const std::vector<GridMethod>& methods, const std::vector<Json>& rows,
               const std::string& title, const char* key, const char* what) {
  HeatMaps maps = {
      .title = title, .x_title = "query head", .y_title = "layer", .scale_title = what, .percent = true};
  for (std::size_t i = 0; i < methods.size(); ++i) {
    const Json& heads = json_member(rows[i], "heads");
    if (!heads.is_array() || heads.empty()) continue;
    std::int64_t layers = 0, columns = 0;
    for (const Json& h : heads) {
      layers = std::max(layers, h.at("layer").get<std::int64_t>() + 1);
      columns = std::max(columns, h.at("head").get<std::int64_t>() + 1);
    }
    HeatMaps::Panel panel = {.title = methods[i].label};
    for (std::int64_t c = 0; c < columns; ++c) panel.columns.push_back(std::to_string(c));
    for (std::int64_t r = 0; r < layers; ++r) panel.rows.push_back(std::to_string(r));
    panel.cells.assign(static_cast<std::size_t>(layers),
                       std::vector<std::optional<double>>(static_cast<std::size_t>(columns)));
    for (const Json& h : heads)
      panel.cells[h.at("layer").get<std::size_t>()][h.at("head").get<std::size_t>()] =
          h.at(key).get<double>();
    maps.panels.push_back(std::move(panel));
  }
  if (!maps.panels.empty())
    s.figure(title + ", in percent; layers that a method leaves exact are dashed.", svg_of(maps));
}

}  // namespace

void write_probe(const Section& s) {
  const Axis bytes = {.title = "share of the bytes read", .unit = Axis::Unit::percent, .log = true};
  const Axis keys = {.title = "share of the far keys attended", .unit = Axis::Unit::percent, .log = true};
  const Axis gap = {.title = "recovered gap", .low = 0.0, .high = 1.0};
  const Axis error = {.title = "relative output error", .low = 0.0};
  for (const std::int64_t length : s.run.lengths) {
    std::vector<GridMethod> methods = s.grid.methods(s.run);
    std::vector<Json> rows = s.grid.probe(s.run, length);
    const std::size_t all = rows.size();
    for (std::size_t i = rows.size(); i-- > 0;) {
      if (!rows[i].is_null()) continue;
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(i));
      methods.erase(methods.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (rows.empty()) {
      s.page.paragraph("Not measured yet.");
      continue;
    }
    if (rows.size() < all)
      s.page.paragraph(fmt::format("So far {} of {} at {} tokens.", rows.size(),
                                   counted(static_cast<std::int64_t>(all), "method"), length_name(length)));
    const std::string at = fmt::format(", {} tokens of text that needs its far past", length_name(length));
    if (s.shows(Show::table))
      probe_table(s, methods, rows,
                  fmt::format("Loss, recovered gap and output error{}; {} (means over heads).", at,
                              s.run.dense.empty() ? "sink=1,window=63" : s.run.dense));
    if (s.shows(Show::recovered_density))
      probe_chart(s, methods, rows, "Recovered gap by bytes read" + at, "density", bytes, false, "recovered",
                  gap);
    if (s.shows(Show::error_density))
      probe_chart(s, methods, rows, "Output error by bytes read" + at, "density", bytes, true, "error",
                  error);
    if (s.shows(Show::error_selectivity))
      probe_chart(s, methods, rows, "Output error by far keys" + at, "selectivity", keys, true, "error",
                  error);
    if (s.shows(Show::mass_selectivity))
      probe_chart(s, methods, rows, "Attention captured, sink and window included" + at, "selectivity", keys,
                  true, "mass", {.title = "share of full attention's mass", .low = 0.0, .high = 1.0});
    if (s.shows(Show::head_maps)) {
      head_maps(s, methods, rows, "Share of full attention's mass that is captured" + at, "mass",
                "of the mass");
      head_maps(s, methods, rows, "Share of the keys that are attended" + at, "density", "of the keys");
    }
  }
}

namespace {

/// A member of every row of a recall run, over the tokens read.
void recall_chart(const Section& s, const std::string& title, const Axis& y,
                  const std::function<double(const Json&)>& value) {
  const Axis x = {.title = "tokens read", .unit = Axis::Unit::tokens, .log = true};
  LineChart chart = {.title = title, .x = x, .y = y};
  for (const GridMethod& m : s.grid.methods(s.run)) {
    Series series = {.label = m.label, .style = style_of(m.label)};
    for (const Json& row : s.grid.recall(s.run, m))
      series.points.push_back({.x = member(row, "tokens"), .y = value(row)});
    chart.series.push_back(std::move(series));
  }
  s.figure(title + "; means over all heads.", chart);
}

}  // namespace

void write_recall(const Section& s) {
  const LocalWindow dense = dense_parts(s.run.dense, RecallOptions().dense);
  // Of the queries' mean position: they are the last tokens.
  const double near =
      static_cast<double>(dense.sink + dense.window) + 0.5 * static_cast<double>(s.run.queries - 1);
  const auto keys = [&](const Json& row) { return member(row, "chosen") * (member(row, "tokens") - near); };
  const bool by_length = s.run.lengths.size() > 1;
  if (by_length && s.shows(Show::recall_length))
    recall_chart(
        s, fmt::format("Recall of the true top {} by length, by weight a", counted(s.run.top, "key")),
        {.title = "recall", .low = 0.0, .high = 1.0}, [](const Json& row) { return member(row, "recall"); });
  if (by_length && s.shows(Show::keys_length))
    recall_chart(s, "Far keys taken by length", {.title = "far keys taken", .log = true}, keys);
  if (!s.shows(Show::table)) return;
  std::vector<std::vector<std::string>> table;
  for (const GridMethod& m : s.grid.methods(s.run)) {
    for (const Json& row : s.grid.recall(s.run, m)) {
      table.push_back({"`" + m.label + "`", length_name(row.at("tokens").get<std::int64_t>()),
                       number(member(row, "recall"), "{:.3f}"),
                       number(member(row, "recall_by_value"), "{:.3f}"), percent(member(row, "chosen")),
                       number(keys(row), "{:.0f}")});
    }
  }
  s.table(fmt::format("Recall of the {} of largest weight a, and of largest a·|v|.",
                      counted(s.run.top, "far key")),
          {"attention", "tokens", "recall (a)", "recall (a·|v|)", "far keys", "keys taken"},
          std::move(table));
}

namespace {

/// One picture a method and layer, a marker for each cluster.
void cluster_chart(const Section& s, const std::string& method, std::int64_t length, const Json& map) {
  LineChart chart = {
      .title = fmt::format("{}: layer {}, KV head {}, {} tokens", method, map.at("layer").get<int>(),
                           map.at("kv_head").get<int>(), length_name(length)),
      .x = {.title = "first principal axis"},
      .y = {.title = "second principal axis"},
      .series = {},
      .rules = {},
      .joined = false};
  for (const Json& group : map.at("groups")) {
    Series& series =
        chart.series.emplace_back(Series{.label = counted(group.at("keys").get<std::int64_t>(), "key"),
                                         .style = static_cast<int>(chart.series.size()),
                                         .points = {}});
    for (const Json& point : group.at("points"))
      series.points.push_back({.x = point.at(0).get<double>(), .y = point.at(1).get<double>()});
  }
  s.figure(fmt::format("{}. Keys of the {} largest of {}; the two axes hold {} of their spread.", chart.title,
                       chart.series.size(), counted(map.at("clusters").get<std::int64_t>(), "cluster"),
                       percent(member(map, "shown"))),
           svg_of(chart));
}

/// A row's label: bench names rows by the specs' own text.
std::string bench_label(const Section& s, const Json& row) {
  const std::string name = row.at("attention").get<std::string>();
  for (const GridMethod& m : s.grid.methods(s.run)) {
    if (m.named.name == name) return m.label;
  }
  return name;
}

/// A row's parts, each measured alone, and what the whole takes besides.
std::vector<double> latency_parts(const Json& row) {
  std::vector<double> parts = {member(row, "select_us"), member(row, "attend_us"), member(row, "merge_us")};
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  parts.push_back(std::max(0.0, member(row, "median_us") - sum));
  return parts;
}

/// Their lengths in a bar that is as long as the whole: less where one part begins before another has ended.
std::vector<double> scaled(std::vector<double> parts, double whole) {
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  for (double& part : parts) part *= sum > 0 ? whole / sum : 0;
  return parts;
}

/// Takes out the parts that no bar has, such as a merge that is part of `attend`.
void drop_empty_parts(BarChart& chart) {
  for (std::size_t p = chart.parts.size(); p-- > 0;) {
    const auto has = [p](const BarChart::Bar& bar) { return bar.lengths[p] > 0; };
    if (std::any_of(chart.bars.begin(), chart.bars.end(), has)) continue;
    const auto at = static_cast<std::ptrdiff_t>(p);
    chart.parts.erase(chart.parts.begin() + at);
    for (BarChart::Bar& bar : chart.bars) {
      bar.lengths.erase(bar.lengths.begin() + at);
      bar.told.erase(bar.told.begin() + at);
    }
  }
}

void latency_bars(const Section& s, const std::vector<Json>& rows, const std::string& what,
                  const std::string& warning) {
  BarChart chart;
  chart.title = "Attention of one layer, " + what;
  chart.mark_title = "plain read of as many bytes";
  chart.x = {.title = "median time", .unit = Axis::Unit::microseconds};
  chart.parts = {"select", "attend", "merge", "the rest"};
  const double full = rows.empty() ? 0 : member(rows.front(), "median_us");
  for (const Json& row : rows) {
    const double median = member(row, "median_us");
    const std::vector<double> parts = latency_parts(row);
    chart.bars.push_back({.label = bench_label(s, row),
                          .note = fmt::format("{}: {:.2f}x as fast as full, {:.2f} of limit",
                                              with_unit(median, Axis::Unit::microseconds), full / median,
                                              member(row, "limit_us") / median),
                          .lengths = scaled(parts, median),
                          .mark = member(row, "limit_us"),
                          .told = parts});
  }
  drop_empty_parts(chart);
  s.figure(join_sentences(
               chart.title + ". A bar is as long as the whole takes. Its parts were each measured alone (the "
                             "table has their times) and share it in proportion where they take longer "
                             "together than the whole. The mark is the time in which plain reads of the "
                             "method's own bytes take place.",
               warning),
           svg_of(chart), in_words(chart));
}

void bench_table(const Section& s, const std::vector<Json>& rows, const std::string& what) {
  std::vector<std::vector<std::string>> table;
  const double full = rows.empty() ? 0 : member(rows.front(), "median_us");
  for (const Json& row : rows) {
    const double median = member(row, "median_us");
    table.push_back({"`" + bench_label(s, row) + "`", number(median, "{:.1f}"),
                     number(member(row, "select_us"), "{:.1f}"), number(member(row, "attend_us"), "{:.1f}"),
                     number(member(row, "limit_us") / median, "{:.2f}"), number(full / median, "{:.2f}"),
                     percent(member(row, "selectivity")), number(member(row, "build_seconds"), "{:.3f}")});
  }
  s.table(what, {"attention", "median µs", "select", "attend", "of limit", "x full", "far keys", "index s"},
          std::move(table));
}

/// Whole steps; what of them is attention is known where nothing is cached.
void step_table(const Section& s, const std::vector<Json>& rows, const std::string& what) {
  std::vector<std::vector<std::string>> table;
  const double full = rows.empty() ? 0 : member(rows.front(), "median_us");
  for (const Json& row : rows) {
    const double median = member(row, "median_us"), attention = member(row, "attention_us");
    table.push_back({"`" + bench_label(s, row) + "`", number(median / 1e3, "{:.3f}"),
                     number(attention / 1e3, "{:.1f}"), number((median - attention) / 1e3, "{:.1f}"),
                     number(full / median, "{:.3g}"), percent(member(row, "density")),
                     percent(member(row, "selectivity")), number(member(row, "build_seconds"), "{:.3f}"),
                     json_has(row, "kv_bytes") ? human_bytes(row.at("kv_bytes").get<std::int64_t>()) : "-"});
  }
  s.table(what,
          {"attention", "median ms", "attention ms", "the rest ms", "x full", "density", "far keys",
           "index s", "keys and values"},
          std::move(table));
}

}  // namespace

void write_clusters(const Section& s) {
  for (const std::int64_t length : s.run.lengths) {
    for (const GridMethod& m : s.grid.methods(s.run)) {
      const std::vector<Json> maps = s.grid.clusters(s.run, length, m);
      if (maps.empty()) s.page.paragraph("Not measured yet.");
      std::vector<std::vector<std::string>> table;
      for (const Json& map : maps) {
        if (s.shows(Show::cluster_map)) cluster_chart(s, m.label, length, map);
        std::int64_t keys = 0;
        for (const Json& group : map.at("groups")) keys += group.at("keys").get<std::int64_t>();
        table.push_back({std::to_string(map.at("layer").get<int>()),
                         std::to_string(map.at("clusters").get<std::int64_t>()), std::to_string(keys),
                         percent(member(map, "shown"))});
      }
      if (s.shows(Show::table) && !maps.empty())
        s.table(fmt::format("Clusters of `{}` at {} tokens.", m.label, length_name(length)),
                {"layer", "clusters", "keys of the largest", "spread on two axes"}, std::move(table));
    }
  }
}

void write_bench(const Section& s) {
  const std::string shape = s.run.kind == RunKind::attention
                                ? fmt::format("{}, batch {}, {}", s.run.shape, s.run.batch,
                                              counted(s.run.query_tokens, "query token"))
                                : "whole steps of the model";
  std::map<std::string, Series> lines;
  std::vector<std::string> order;
  for (const std::int64_t length : s.run.lengths) {
    const std::vector<Json> rows = s.grid.bench(s.run, length);
    if (rows.empty()) {
      s.page.paragraph("Not measured yet.");
      continue;
    }
    const std::string what = fmt::format("{} keys, {}", length_name(length), shape);
    const std::optional<CostLog> effort = s.grid.effort_of(s.run, length);
    const std::string warning = effort ? busy_warning(effort->others_share()) : std::string();
    if (s.shows(Show::latency_bars)) latency_bars(s, rows, what, warning);
    if (s.shows(Show::table)) {
      const bool of_layer = s.run.kind == RunKind::attention;
      const std::string keys = of_layer ? "made-up clustered keys" : "made-up keys";
      const std::string where =
          s.grid.is_on_host(s.run) ? ", which lie in host memory with their values" : "";
      const std::string caption = join_sentences("Times at " + what + "; " + keys + where + ".", warning);
      of_layer ? bench_table(s, rows, caption) : step_table(s, rows, caption);
    }
    for (const Json& row : rows) {
      const std::string label = bench_label(s, row);
      if (lines.emplace(label, Series{label, style_of(label), {}}).second) order.push_back(label);
      lines[label].points.push_back({.x = static_cast<double>(length), .y = member(row, "median_us")});
    }
  }
  if (!s.shows(Show::latency_length) || s.run.lengths.size() < 2) return;
  const Axis x = {.title = "keys", .unit = Axis::Unit::tokens, .log = true};
  const Axis y = {.title = "median time", .unit = Axis::Unit::microseconds, .log = true};
  LineChart chart = {.title = "Time by length, " + shape, .x = x, .y = y};
  for (const std::string& label : order) chart.series.push_back(lines[label]);
  s.figure(chart.title + ".", chart);
}

}  // namespace lode
